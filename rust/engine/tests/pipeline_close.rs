//! The end of an engine: what is finished, what is left, and that a stuck disk holds nobody.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod pipeline;

use std::path::Path;
use std::time::Duration;

use pipeline::{Bed, LONG, bytes_of, committed, model, options, save, tags};
use relight_engine::events::{Event, Level};
use relight_engine::image::Tier;
use relight_engine::share::BeginOptions;
use relight_engine::ticket::TicketState;
use relight_engine::wait::never;
use relight_engine::{Error, ErrorKind};
use relight_testkit::Op;

#[test]
fn test_bl_083_close_finishes_what_is_queued() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    let tickets: Vec<_> = (0..5).map(|step| save(&root, &format!("global_step{step}"), &model(step, 90_000))).collect();
    assert!(engine.close(None, &never).unwrap());
    assert!(tickets.iter().all(|ticket| ticket.state() == TicketState::Committed));
    assert!(engine.close(None, &never).unwrap(), "a second close says the same");
    assert_eq!(root.begin("t", BeginOptions::default()).unwrap_err().kind, ErrorKind::Closed);
    assert_eq!(tags(&root).len(), 5, "a closed engine still reads");
    assert!(root.open_image("global_step4", "model.pt", None).is_ok());
    let mut events = std::iter::from_fn(|| engine.next_event(Duration::ZERO)).take(100);
    assert!(events.any(|event| event == Event::Closed));
    assert!(bed.region_files().is_empty());
}

#[test]
fn test_bl_087_close_ends_within_its_limit_on_a_stuck_disk_and_leaves_the_rest_for_the_next_process() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    assert!(committed(&save(&root, "global_step0", &model(0, 50_000))));
    bed.slow.gate().close(Op::Write, "global_step1");
    let stuck = save(&root, "global_step1", &model(1, 50_000));
    let queued = save(&root, "global_step2", &model(2, 50_000));
    bed.slow.gate().wait_until_stuck(1);
    assert!(!engine.close(Some(Duration::from_millis(150)), &never).unwrap());
    assert_eq!(queued.check().unwrap_err().kind, ErrorKind::Closed);
    let said: Vec<_> = std::iter::from_fn(|| engine.next_event(Duration::ZERO))
        .take(100)
        .filter_map(|event| match event {
            Event::Log { level: Level::Warning, message, .. } => Some(message),
            _ => None,
        })
        .collect();
    assert!(said.iter().any(|text| text.contains("global_step1")), "{said:?}");
    assert!(said.iter().any(|text| text.contains("global_step2")), "{said:?}");
    assert_eq!(bed.region_files().len(), 1);

    // The disk comes back: the write that was stuck finishes by itself, the thread ends and gives the region up.
    bed.slow.gate().open();
    assert!(stuck.wait(LONG, &never).unwrap());
    drop((engine, root));
    let next = bed.engine(options(&bed));
    let found = pipeline::drain_until_found(&next);
    assert!(found.iter().any(|region| region.tags.iter().any(|tag| tag.tag == "global_step2" && !tag.persisted)));
    let root = next.open_root(Path::new("/ckpt"), false, true).unwrap();
    assert!(next.flush(LONG, &never).unwrap());
    assert_eq!(tags(&root), ["global_step0", "global_step1", "global_step2"]);
    let image = root.open_image("global_step2", "model.pt", Some(Tier::Persistent)).unwrap();
    assert_eq!(bytes_of(&image), model(2, 50_000));
    assert!(next.close(LONG, &never).unwrap());
    assert!(bed.region_files().is_empty());
}

#[test]
fn an_interrupted_close_can_be_called_again() {
    let bed = Bed::new();
    let engine = bed.engine(options(&bed));
    let root = engine.open_root(Path::new("/ckpt"), true, true).unwrap();
    bed.slow.gate().close(Op::Write, "global_step1");
    let ticket = save(&root, "global_step1", &model(1, 50_000));
    bed.slow.gate().wait_until_stuck(1);
    let ctrl_c = || Err(Error::new(ErrorKind::Interrupted, "Ctrl-C"));
    assert_eq!(engine.close(None, &ctrl_c).unwrap_err().kind, ErrorKind::Interrupted);
    assert!(!engine.flush(Some(Duration::from_millis(1)), &never).unwrap());
    bed.slow.gate().open();
    assert!(engine.close(None, &never).unwrap());
    assert_eq!(ticket.state(), TicketState::Committed);
}
