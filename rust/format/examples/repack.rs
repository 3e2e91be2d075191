//! Packs a torch.save file anew in relight's layout: `repack IN OUT`. Makes the golden archive, and files to try other
//! readers on.

use std::error::Error;

use relight_format::crc::crc32;
use relight_format::zip::{Archive, ArchiveLayout, EntrySpec, align_for};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(input), Some(output)) = (args.next(), args.next()) else {
        return Err("usage: repack IN OUT".into());
    };
    let bytes = std::fs::read(input)?;
    let archive = Archive::parse(bytes.len() as u64, &mut |offset, count| {
        Ok::<_, std::convert::Infallible>(bytes[offset as usize..offset as usize + count].to_vec())
    })?;
    let entries: Vec<(&str, &[u8])> = archive
        .entries
        .iter()
        .map(|entry| match entry.name.as_str() {
            // The spacing is not uniform, so torch must not compute offsets.
            ".format_version" => (".format_version", &b"0"[..]),
            name => (name, &bytes[entry.data_offset as usize..entry.data_end() as usize]),
        })
        .collect();
    let specs: Vec<EntrySpec> = entries
        .iter()
        .map(|(name, data)| {
            let len = data.len() as u64;
            EntrySpec { name: (*name).to_owned(), len, align: align_for(len) }
        })
        .collect();
    let layout = ArchiveLayout::new(&archive.stem, &specs)?;
    let mut packed = Vec::new();
    let mut crcs = Vec::new();
    for (i, (_, data)) in entries.iter().enumerate() {
        packed.extend(layout.header_bytes(i));
        packed.extend_from_slice(data);
        crcs.push(crc32(data));
        packed.extend(layout.descriptor_bytes(i, crcs[i]));
    }
    packed.extend(layout.trailer_bytes(&crcs));
    std::fs::write(output, packed)?;
    Ok(())
}
