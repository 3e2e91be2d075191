//! The lines of `checkpointHistories.csv`.
//!
//! Owns: the columns, their order, the words in them.
//! Must not: write the file or quote a field (the engine does, one writer per root).

/// The columns, in order; also the file's first line.
pub const COLUMNS: [&str; 10] =
    ["time", "event", "tag", "file", "rank", "tier", "bytes", "seconds", "mb_per_s", "error"];

/// The file's first line, without the line end.
pub const HEADER: &str = "time,event,tag,file,rank,tier,bytes,seconds,mb_per_s,error";

/// The name of the file below the root.
pub const FILE_NAME: &str = "checkpointHistories.csv";

/// One line: something that happened to a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct HistoryRecord {
    /// When, RFC 3339 UTC.
    pub time: String,
    /// What: a word of the engine, as `persist`, `commit`, `load`, `retry`, `failed`, `delete`, `drain`.
    pub event: String,
    /// The tag.
    pub tag: String,
    /// The file's true name; empty where the whole tag is meant.
    pub file: String,
    /// The rank.
    pub rank: u32,
    /// `memory`, `local` or `persistent`.
    pub tier: String,
    /// Bytes moved.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
    /// The message, where it failed.
    pub error: String,
}

impl HistoryRecord {
    /// The fields in the order of [`COLUMNS`], not yet quoted. Line ends become spaces: one event is one line, for
    /// every tool that reads lines.
    pub fn fields(&self) -> [String; 10] {
        let mb_per_s = if self.seconds > 0.0 { self.bytes as f64 / 1e6 / self.seconds } else { 0.0 };
        let one_line = |text: &str| text.replace(['\r', '\n'], " ");
        [
            one_line(&self.time),
            one_line(&self.event),
            one_line(&self.tag),
            one_line(&self.file),
            self.rank.to_string(),
            one_line(&self.tier),
            self.bytes.to_string(),
            format!("{:.6}", self.seconds),
            format!("{mb_per_s:.1}"),
            one_line(&self.error),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_the_columns() {
        assert_eq!(COLUMNS.join(","), HEADER);
    }

    #[test]
    fn a_record_is_one_line_with_its_speed() {
        let record = HistoryRecord {
            time: "2026-11-29T16:30:41.250Z".into(),
            event: "persist".into(),
            tag: "global_step5".into(),
            file: "a\nb.pt".into(),
            rank: 3,
            tier: "persistent".into(),
            bytes: 5_000_000,
            seconds: 2.0,
            error: String::new(),
        };
        let fields = record.fields();
        assert_eq!(fields[3], "a b.pt");
        assert_eq!(fields[7..9], ["2.000000", "2.5"]);
    }
}
