//! The way of a save: stage, seal, persist, commit; what readers see meanwhile and after.

mod pipeline;

use std::path::Path;
use std::time::Duration;

use pipeline::{Bed, bytes_of, model, options, plan_of};
use relight_engine::image::Tier;
use relight_engine::save_file::MemoryKind;
use relight_engine::share::BeginOptions;
use relight_engine::ticket::TicketState;
use relight_engine::wait::never;
use relight_testkit::Op;

#[test]
fn a_save_is_readable_from_memory_at_the_seal_and_from_the_disk_after_the_commit() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().close(Op::CreateFile, ".relight-tmp");
    let state = model(1, 300_000);

    let share = root.begin("global_step5", BeginOptions::default()).unwrap();
    let report = share.stage("model.pt", &plan_of(&state), true, &never).unwrap();
    assert_eq!(report.memory, MemoryKind::Shared);
    assert!(root.list().unwrap().is_empty(), "a share is invisible before its seal");
    assert_eq!(root.latest().unwrap(), None);
    let ticket = share.seal(&never).unwrap();

    let listed = root.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].tag.as_str(), listed[0].step, listed[0].sequence), ("global_step5", Some(5), 1));
    assert_eq!(listed[0].tiers, [Tier::Memory]);
    assert_eq!(root.latest().unwrap().as_deref(), Some("global_step5"));
    let image = root.open_image("global_step5", "model.pt", None).unwrap();
    assert_eq!(image.tier(), Tier::Memory);
    assert_eq!(bytes_of(&image), state);
    drop(image);

    bed.slow.gate().open();
    assert!(ticket.wait(Some(Duration::from_secs(60)), &never).unwrap());
    ticket.check().unwrap();
    assert_eq!(ticket.state(), TicketState::Committed);
    let listed = root.list().unwrap();
    assert_eq!(listed[0].tiers, [Tier::Memory, Tier::Persistent]);
    let image = root.open_image("global_step5", "model.pt", Some(Tier::Persistent)).unwrap();
    assert_eq!(image.tier(), Tier::Persistent);
    assert_eq!(bytes_of(&image), state);
    assert!(root.verify("global_step5", &never).unwrap().ok());
    assert!(engine.close(Some(Duration::from_secs(60)), &never).unwrap());
    assert!(bed.region_files().is_empty(), "a clean close leaves no region");
}
