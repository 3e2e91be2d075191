use super::*;
use proptest::prelude::*;

#[test]
fn test_bl_158_odd_tags_are_kept_or_refused() {
    for tag in ["a b", "a_b", "a.b", "global_step500", "last.ckpt", "épo🔥", "a%b", "epoch=1-step=2", "COM10", "v-.1"]
    {
        assert_eq!(check_tag(tag), Ok(()), "{tag}");
    }
    let long = "x".repeat(201);
    for tag in [
        "",
        ".",
        "..",
        "a/b",
        "a\\b",
        "a:b",
        "a\nb",
        "a\0b",
        ".hidden",
        ".relight",
        "a.",
        "a ",
        " a",
        "CON",
        "nul.txt",
        "com1",
        "latest",
        "Latest",
        "checkpointHistories.csv",
        "a\u{7f}b",
        "a*b",
        &long,
    ] {
        assert!(check_tag(tag).is_err(), "{tag:?}");
    }
}

#[test]
fn test_bl_159_a_tag_that_would_leave_the_root_is_refused_with_a_way_out() {
    for tag in ["val/loss=0.1", "../x", "/etc/passwd", "..\\x", "C:\\x"] {
        let error = check_tag(tag).unwrap_err().to_string();
        assert!(error.contains("use - or _ instead"), "{error}");
    }
}

#[test]
fn ordinary_file_names_stay_as_they_are() {
    for name in ["model.pt", "mp_rank_00_model_states.pt", "a b  c", "ünï🔥.bin", "x", "latest"] {
        assert_eq!(escape_file_name(name), name);
    }
}

#[test]
fn test_bl_158_odd_file_names_are_escaped() {
    for (name, escaped) in [
        ("a/b", "a%2Fb"),
        ("a\\b", "a%5Cb"),
        ("a:b", "a%3Ab"),
        ("..", "%2E%2E"),
        (".", "%2E"),
        ("a%2Fb", "a%252Fb"),
        ("a\nb\0", "a%0Ab%00"),
        (".relight", "%2Erelight"),
        ("complete.txt", "%63omplete.txt"),
        ("Complete.TXT", "%43omplete.TXT"),
        ("CON", "%43ON"),
        ("con.pt", "%63on.pt"),
        ("a ", "a%20"),
        ("a.", "a%2E"),
    ] {
        assert_eq!(escape_file_name(name), escaped);
    }
}

#[test]
fn a_long_name_is_cut_and_hashed_and_keeps_its_extension() {
    let (a, b) = (format!("{}a.pt", "é".repeat(150)), format!("{}b.pt", "é".repeat(150)));
    let escaped = [escape_file_name(&a), escape_file_name(&b)];
    assert_ne!(escaped[0], escaped[1]);
    for path in &escaped {
        assert!(path.len() <= FILE_BYTES_MAX && path.ends_with(".pt") && path.contains("%~"), "{path}");
    }
    // What lies on disk must be found again by the next version.
    assert_eq!(fnv1a_128(b"foobar"), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
}

#[test]
fn test_bl_096_the_step_is_read_by_value() {
    for (tag, step) in [
        ("global_step500", Some(500)),
        ("09000000", Some(9_000_000)),
        ("100000", Some(100_000)),
        ("10.bak", Some(10)),
        ("best", None),
        ("", None),
        ("epoch=3-step=100.ckpt", Some(100)),
        ("global_step7-v2", Some(7)),
        ("é12é", Some(12)),
        ("99999999999999999999", None),
        ("global_step", None),
        ("step9223372036854775807", Some(i64::MAX)),
    ] {
        assert_eq!(step_of_tag(tag), step, "{tag}");
    }
}

/// The true name of a path that was not cut.
fn unescape(path: &str) -> Vec<u8> {
    let (mut bytes, mut out) = (path.bytes(), Vec::new());
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let digits = [bytes.next().unwrap(), bytes.next().unwrap()];
            out.push(u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap());
        } else {
            out.push(byte);
        }
    }
    out
}

proptest! {
    #[test]
    fn escaped_names_are_plain_components_and_read_back(name in "[ -~\\n\\x00./%\\\\:éCON]{1,60}|\\PC{1,90}") {
        let path = escape_file_name(&name);
        prop_assert!(is_plain_component(&path), "{:?}", path);
        prop_assert!(path.len() <= FILE_BYTES_MAX);
        if !path.contains("%~") {
            prop_assert_eq!(unescape(&path), name.as_bytes());
        }
    }

    #[test]
    fn different_names_have_different_paths(a in "[ab./%:]{1,5}", b in "[ab./%:]{1,5}") {
        prop_assert_eq!(escape_file_name(&a) == escape_file_name(&b), a == b);
    }

    #[test]
    fn an_allowed_tag_is_a_plain_component(tag in "[ -~\\n./éCON]{0,12}|\\PC{0,20}") {
        if check_tag(&tag).is_ok() {
            prop_assert!(is_plain_component(&tag) || tag.eq_ignore_ascii_case(COMPLETE));
        }
        let _ = step_of_tag(&tag);
    }
}
