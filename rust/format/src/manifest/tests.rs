use super::*;
use proptest::prelude::*;

pub(crate) fn record(name: &str, generation: u64, content: &[u8]) -> FileRecord {
    FileRecord {
        name: name.to_owned(),
        path: names::escape_file_name(name),
        generation,
        bytes: content.len() as u64,
        crc32: crc::crc32(content),
        chunk_bytes: 4,
        chunks: content.chunks(4).map(crc::crc32).collect(),
        rank: 0,
        codec: CODEC_NONE.to_owned(),
    }
}

fn manifest() -> Manifest {
    Manifest {
        schema_version: SCHEMA_VERSION,
        tag: "global_step500".to_owned(),
        generation: 2,
        run: 1,
        sequence: 7,
        step: Some(500),
        world_size: 1,
        created_by: "relight 0.1.0".to_owned(),
        staged_at: "2026-11-29T16:30:41.250Z".to_owned(),
        committed_at: "2026-11-29T16:30:42.000Z".to_owned(),
        best: false,
        files: vec![record("model.pt", 1, b"0123456789"), record("a/b\n.pt", 2, b"")],
        writers: vec![Writer { rank: 0, host: "node".to_owned(), pid: 42 }],
        meta: serde_json::json!({"loss": 0.1, "tiny": 5e-324, "n": [1, null, {"é": true}]}),
    }
}

fn part() -> Part {
    Part {
        schema_version: SCHEMA_VERSION,
        tag: "t1".to_owned(),
        generation: 3,
        rank: 0,
        world_size: 2,
        files: vec![record("x", 3, b"abc")],
    }
}

#[test]
fn manifests_and_parts_read_back_equal() {
    assert_eq!(Manifest::parse(&manifest().to_bytes().unwrap()).unwrap(), manifest());
    assert_eq!(Part::parse(&part().to_bytes().unwrap()).unwrap(), part());
}

#[test]
fn the_text_is_plain_json_and_its_last_member_covers_what_stands_before() {
    let bytes = manifest().to_bytes().unwrap();
    let value: Value = serde_json::from_slice(&bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let covered = &text[..text.rfind(",\n  \"crc32\"").unwrap()];
    assert_eq!(value["crc32"], format!("{:08x}", crc::crc32(covered.as_bytes())));
    assert_eq!(value["files"][0]["chunks"].as_str().unwrap().len(), 24);
}

/// Guards: a flipped bit in a manifest that still parses, as a step, a size or a file's checksum.
#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let bytes = manifest().to_bytes().unwrap();
    for at in 0..bytes.len() {
        assert!(Manifest::parse(&bytes[..at]).is_err(), "cut at {at}");
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            assert!(Manifest::parse(&flipped).is_err(), "flip at {at}, bit {bit}");
        }
    }
}

#[test]
fn a_newer_schema_names_what_can_read_it() {
    let mut newer = manifest();
    newer.schema_version = 2;
    newer.created_by = "relight 3.0.0".to_owned();
    for bytes in [text::write(&newer).unwrap(), br#"{"schema_version": 2, "created_by": "relight 3.0.0"}"#.to_vec()] {
        let error = Manifest::parse(&bytes).unwrap_err();
        assert!(matches!(error, ManifestError::Newer { found: 2, .. }), "{error}");
        assert!(error.to_string().contains("relight 3.0.0"), "{error}");
    }
}

#[test]
fn a_member_that_a_later_version_added_is_ignored() {
    let mut text = serde_json::to_value(manifest()).unwrap();
    text["later"] = 1.into();
    assert_eq!(Manifest::parse(&text::write(&text).unwrap()).unwrap(), manifest());
}

#[test]
fn broken_rules_are_neither_written_nor_read() {
    type Break = fn(&mut Manifest);
    let breaks: [(&str, Break); 12] = [
        ("two files of one name", |m| m.files.push(m.files[0].clone())),
        ("names that differ in case", |m| m.files.push(record("MODEL.pt", 1, b"x"))),
        ("a path that leaves the tag", |m| m.files[0].path = "../model.pt".to_owned()),
        ("a path of another name", |m| m.files[0].path = "other.pt".to_owned()),
        ("a file of the future", |m| m.files[0].generation = 3),
        ("a chunk less", |m| m.files[0].chunks.truncate(2)),
        ("a length that the chunks do not make", |m| m.files[0].bytes = 13),
        ("a checksum that the chunks do not make", |m| m.files[0].crc32 ^= 1),
        ("a tag that leaves the root", |m| m.tag = "../x".to_owned()),
        ("no sequence number", |m| m.sequence = 0),
        ("an unknown codec", |m| m.files[0].codec = "lz77".to_owned()),
        ("meta without end", |m| m.meta = (0..70).fold(Value::Null, |inner, _| Value::Array(vec![inner]))),
    ];
    for (name, breaks) in breaks {
        let mut broken = manifest();
        breaks(&mut broken);
        assert!(matches!(broken.to_bytes(), Err(ManifestError::Invariant(_))), "{name} was written");
        assert!(Manifest::parse(&text::write(&broken).unwrap()).is_err(), "{name} was read");
    }
    let mut stranger = part();
    stranger.files[0].rank = 1;
    assert!(stranger.to_bytes().is_err());
}

#[test]
fn a_chunk_knows_its_length() {
    let file = record("x", 1, b"0123456789");
    assert_eq!([0, 1, 2, 3].map(|i| file.chunk_len(i)), [4, 4, 2, 0]);
}

proptest! {
    #[test]
    fn bytes_from_outside_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Manifest::parse(&bytes).is_err());
        prop_assert!(Part::parse(&bytes).is_err());
    }

    #[test]
    fn numbers_of_the_user_come_back_bit_for_bit(x in any::<f64>().prop_filter("JSON has no such number", |x| x.is_finite()), n in any::<i64>()) {
        let mut with = manifest();
        with.meta = serde_json::json!({"x": x, "n": n});
        let back = Manifest::parse(&with.to_bytes().unwrap()).unwrap();
        prop_assert_eq!(back.meta["x"].as_f64().map(f64::to_bits), Some(x.to_bits()));
        prop_assert_eq!(back.meta["n"].as_i64(), Some(n));
    }
}
