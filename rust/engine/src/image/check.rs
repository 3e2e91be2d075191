//! Verifying an image: every byte is read once and compared with all that is known of it.
//!
//! Owns: the sentences about what is wrong.
//! Must not: stop at the first problem.

use relight_format::crc;
use relight_format::zip::{self, ArchiveEntry};

use super::source::Buffer;
use super::{Image, PIECE_BYTES, ReadOptions, entry_problem};
use crate::error::Result;
use crate::wait::Pulse;

/// A range of the image and the checksum that is being made of it.
struct Running {
    end: u64,
    crc32: u32,
}

impl Running {
    fn push(&mut self, crc32: u32, len: u64) {
        self.crc32 = crc::combine(self.crc32, crc32, len);
    }
}

impl Image {
    /// Reads everything; one sentence per problem, empty if all is as written: the entries' checksums, headers,
    /// descriptors and padding, and with a manifest the chunks and the whole file. An archive without checksums is a
    /// problem too, for nothing vouches for its bytes.
    ///
    /// # Errors
    /// Only if the bytes cannot be read, or the interrupt says so.
    pub fn verify(&self, options: &ReadOptions<'_>) -> Result<Vec<String>> {
        let mut problems = Vec::new();
        if !self.archive.has_checksums && self.record.is_none() {
            problems.push(
                "the archive was written without checksums (torch.serialization.set_crc32_options(False)): \
                 its data cannot be verified"
                    .to_owned(),
            );
        }
        self.verify_data(options, &mut problems).map_err(|error| self.tagged(error))?;
        self.verify_between(&mut problems).map_err(|error| self.tagged(error))?;
        Ok(problems)
    }

    /// One pass over all bytes, cut where an entry or a chunk begins or ends.
    fn verify_data(&self, options: &ReadOptions<'_>, problems: &mut Vec<String>) -> Result<()> {
        let mut entries: Vec<&ArchiveEntry> = self.archive.entries.iter().collect();
        entries.sort_by_key(|entry| entry.data_offset);
        let mut entries = entries.into_iter().peekable();
        let chunk_bytes = self.record.as_ref().map_or(self.len, |record| record.chunk_bytes).max(1);
        let mut pulse = Pulse::new(options.clock, options.interrupt);
        let mut buffer = Buffer::default();
        let mut current: Option<(&ArchiveEntry, Running)> = None;
        let mut chunk = Running { end: chunk_bytes.min(self.len), crc32: 0 };
        let (mut chunks, mut whole) = (Vec::new(), 0);
        let mut window_start = 0;
        while window_start < self.len {
            pulse.poll()?;
            let window_end = self.len.min(window_start + PIECE_BYTES);
            let count = (window_end - window_start) as usize;
            let window = self.source.view(&self.path, window_start, count, &mut buffer)?;
            let mut at = window_start;
            loop {
                while let Some(entry) = entries.next_if(|entry| current.is_none() && entry.data_offset <= at) {
                    // One without bytes ends where it begins.
                    if entry.packed_len == 0 {
                        self.judge_entry(entry, 0, problems);
                    } else {
                        current = Some((entry, Running { end: entry.data_end(), crc32: 0 }));
                    }
                }
                if at == window_end {
                    break;
                }
                let cut = current.as_ref().map(|(_, running)| running.end);
                let cut = cut.or_else(|| entries.peek().map(|entry| entry.data_offset)).unwrap_or(self.len);
                let end = window_end.min(chunk.end).min(cut);
                let sum = crc::crc32(&window[(at - window_start) as usize..(end - window_start) as usize]);
                whole = crc::combine(whole, sum, end - at);
                chunk.push(sum, end - at);
                if let Some((_, running)) = &mut current {
                    running.push(sum, end - at);
                }
                if let Some((entry, running)) = current.take_if(|(_, running)| running.end == end) {
                    self.judge_entry(entry, running.crc32, problems);
                }
                if chunk.end == end {
                    chunks.push(chunk.crc32);
                    chunk = Running { end: end.saturating_add(chunk_bytes).min(self.len), crc32: 0 };
                }
                at = end;
            }
            window_start = window_end;
        }
        self.judge_file(&chunks, whole, problems);
        Ok(())
    }

    fn judge_entry(&self, entry: &ArchiveEntry, sum: u32, problems: &mut Vec<String>) {
        if entry.stored && self.archive.has_checksums && sum != entry.crc32 {
            problems.push(entry_problem(entry, sum));
        }
    }

    fn judge_file(&self, chunks: &[u32], whole: u32, problems: &mut Vec<String>) {
        let Some(record) = &self.record else { return };
        if whole == record.crc32 && chunks == record.chunks {
            return;
        }
        let bad = chunks.iter().zip(&record.chunks).enumerate().filter(|(_, (read, written))| read != written);
        for (index, (read, written)) in bad {
            problems.push(format!(
                "the chunk at offset {} ({} bytes) has checksum {read:08x}, its manifest says {written:08x}",
                index as u64 * record.chunk_bytes,
                record.chunk_len(index)
            ));
        }
        if whole != record.crc32 {
            problems.push(format!("the file has checksum {whole:08x}, its manifest says {:08x}", record.crc32));
        }
    }

    /// What lies between the data of the entries.
    fn verify_between(&self, problems: &mut Vec<String>) -> Result<()> {
        let mut entries: Vec<&ArchiveEntry> = self.archive.entries.iter().collect();
        entries.sort_by_key(|entry| entry.header_offset);
        if let Some(first) = entries.first().filter(|entry| entry.header_offset > 0) {
            problems.push(format!("the first {} bytes of the file belong to no entry", first.header_offset));
        }
        let mut buffer = Buffer::default();
        for (at, entry) in entries.iter().enumerate() {
            let header_len = (entry.data_offset - entry.header_offset) as usize; // name and extra fields: 16 bits each
            let header = self.source.view(&self.path, entry.header_offset, header_len, &mut buffer)?;
            problems.extend(zip::padding_problem(entry, header));
            let next = entries.get(at + 1).map_or(self.archive.directory_offset, |next| next.header_offset);
            let gap_len = next - entry.data_end();
            if gap_len > 64 {
                problems.push(format!(
                    "{gap_len} bytes after {} (offset {}) belong to no entry",
                    entry.name,
                    entry.data_end()
                ));
                continue;
            }
            let gap = self.source.view(&self.path, entry.data_end(), gap_len as usize, &mut buffer)?;
            problems.extend(zip::gap_problem(entry, gap));
        }
        Ok(())
    }
}
