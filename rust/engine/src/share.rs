//! Share: what one rank saves under one tag.
//!
//! Owns: the files of a save between `begin` and `seal`, and the generation of those that memory could not hold.
//! Must not: be visible to any reader before the seal; commit (the persist thread does, in order).
//! Invariant: a share ends once: sealed, abandoned or dropped. Unless sealed, it leaves nothing behind.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use relight_format::manifest::{FileRecord, META_DEPTH_MAX};
use relight_format::names;
use relight_format::record::{SlotRecord, TagRecord, Target};
use serde_json::Value;

use crate::core::{Begun, Core, RootState, Spilled};
use crate::engine::{Engine, blank_record, record_bytes};
use crate::error::{Error, ErrorKind, Result};
use crate::events::Level;
use crate::generation::Generation;
use crate::image::Image;
use crate::memory::Room;
use crate::plan::ImagePlan;
use crate::save_file::{MemoryKind, StageReport, seconds_since, with_need};
use crate::staged::{Purpose, Staged, StagedImage};
use crate::stream::{End, stream_image};
use crate::ticket::Ticket;
use crate::wait::{Interrupt, lock};

/// What a save says about its tag.
#[derive(Clone, Debug)]
pub struct BeginOptions {
    /// The training step; None: from the tag.
    pub step: Option<i64>,
    /// The rank of this process.
    pub rank: u32,
    /// How many ranks write the tag.
    pub world_size: u32,
    /// The user's own JSON.
    pub meta: Value,
    /// Marked as the best so far.
    pub best: bool,
    /// How many checkpoints to keep after the commit; None: all.
    pub keep: Option<usize>,
}

impl Default for BeginOptions {
    fn default() -> Self {
        Self { step: None, rank: 0, world_size: 1, meta: Value::Object(Default::default()), best: false, keep: None }
    }
}

impl BeginOptions {
    fn check(&self, tag: &str) -> Result<()> {
        let refuse = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text).of_tag(tag));
        if (self.rank, self.world_size) != (0, 1) {
            return refuse(format!(
                "rank {} of {}: a tag is written by one rank in this version; give rank=0, world_size=1 and a root of \
                 its own for each rank",
                self.rank, self.world_size
            ));
        }
        if self.keep.is_some_and(|keep| keep == 0 || u32::try_from(keep).is_err()) {
            return refuse("keep is how many checkpoints stay: at least 1, or None for all".to_owned());
        }
        if nests_deeper(&self.meta, META_DEPTH_MAX) {
            return refuse(format!("meta nests deeper than {META_DEPTH_MAX} levels; flatten it"));
        }
        Ok(())
    }
}

fn nests_deeper(value: &Value, levels: usize) -> bool {
    let Some(below) = levels.checked_sub(1) else { return true };
    match value {
        Value::Array(items) => items.iter().any(|item| nests_deeper(item, below)),
        Value::Object(members) => members.values().any(|member| nests_deeper(member, below)),
        _ => false,
    }
}

/// Where a file of the share is.
#[derive(Debug)]
enum Place {
    Memory(Arc<StagedImage>),
    Durable(FileRecord),
}

#[derive(Debug)]
struct ShareFile {
    name: String,
    place: Place,
}

/// The generation of the files that are durable already.
#[derive(Debug)]
enum Held {
    None,
    Here(Box<Generation>),
    /// A thread writes in it.
    Out,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    Sealing,
    Ended,
}

#[derive(Debug)]
struct Inner {
    stage: Stage,
    files: Vec<ShareFile>,
    generation: Held,
    /// None once the share has ended.
    begun: Option<Begun>,
}

/// What one rank saves under one tag: a new generation, additive per file.
#[derive(Debug)]
pub struct Share {
    core: Arc<Core>,
    /// Keeps the engine at work until the share has ended.
    _engine: Engine,
    root: Arc<RootState>,
    tag: String,
    options: BeginOptions,
    number: u64,
    // Never held while the caller is asked for an interrupt: a signal handler may save to this very share.
    inner: Mutex<Inner>,
}

impl Share {
    pub(crate) fn begin(engine: Engine, root: Arc<RootState>, tag: &str, options: BeginOptions) -> Result<Self> {
        let core = Arc::clone(engine.core());
        core.check_open()?;
        crate::root::check_tag(tag)?;
        options.check(tag)?;
        if root.is_between_runs() {
            // Others may have saved here since the root was opened. Where it cannot be read now, the persist says so.
            let _ = root.look_again();
        }
        root.store.tag(tag)?.refuse_known_case_twin()?;
        let begun = Some(root.begin_tag(tag)?);
        let number = core.new_share();
        let inner = Inner { stage: Stage::Open, files: Vec::new(), generation: Held::None, begun };
        Ok(Self { core, _engine: engine, root, tag: tag.to_owned(), options, number, inner: Mutex::new(inner) })
    }

    /// Its tag.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The files staged so far, in the order in which they were first staged.
    pub fn files(&self) -> Vec<String> {
        lock(&self.inner).files.iter().map(|file| file.name.clone()).collect()
    }

    /// Copies the bytes of one file; on return the caller may change its tensors. The same file again replaces it.
    ///
    /// # Errors
    /// The file is then as it was before the call. `Torn` if `compare` finds a difference; `Interrupted` as the
    /// caller's check says.
    pub fn stage(
        &self,
        file: &str,
        plan: &ImagePlan<'_>,
        compare: bool,
        interrupt: Interrupt<'_>,
    ) -> Result<StageReport> {
        self.core.check_open()?;
        names::check_file_name(file).map_err(|cause| self.refuse(cause.to_string()))?;
        self.check_name(file)?;
        let started = self.core.clock.monotonic();
        let target = Target::Tag { root: self.root.store.path().display().to_string(), tag: self.tag.clone() };
        let record = blank_record(plan, self.core.options.chunk_bytes, target, file, self.number);
        let (image, waited) = self
            .core
            .stage(plan, record, compare, &mut || self.spill_oldest(), interrupt)
            .map_err(|error| self.named(error, file))?;
        let report = |bytes, crc32, memory| StageReport {
            bytes,
            crc32,
            seconds: seconds_since(self.core.clock.as_ref(), started),
            wait_seconds: waited.as_secs_f64(),
            streamed: memory == MemoryKind::None,
            memory,
        };
        match image {
            Some(image) => {
                let report = report(image.record.bytes, image.record.crc32, image.memory);
                self.put(file, Place::Memory(Arc::new(image)))?;
                Ok(report)
            }
            None => {
                let record = self.stream(file, plan, compare, interrupt).map_err(|error| self.named(error, file))?;
                let report = report(record.bytes, record.crc32, MemoryKind::None);
                self.put(file, Place::Durable(record))?;
                Ok(report)
            }
        }
    }

    /// The image of a staged file.
    pub fn image(&self, file: &str) -> Result<Image> {
        let inner = lock(&self.inner);
        match inner.files.iter().find(|staged| staged.name == file).map(|staged| &staged.place) {
            Some(Place::Memory(image)) => crate::tags::memory_image(image, &self.tag),
            Some(Place::Durable(record)) => {
                let Held::Here(generation) = &inner.generation else { return Err(self.busy()) };
                let path = generation.paths().staged(generation.number(), &record.path);
                Ok(Image::open_file(self.core.disk.as_ref(), &path, Some(record))?.of_tag(&self.tag))
            }
            None => {
                drop(inner);
                let text = format!("{file} is not staged under {}; staged are {:?}", self.tag, self.files());
                Err(Error::new(ErrorKind::NotFound, text).of_tag(&self.tag))
            }
        }
    }

    /// Declares that all files are there: complete in memory now, persisted and committed in the background.
    ///
    /// A share of which files were streamed has no copy in memory that a successor could finish: then this waits for
    /// the commit.
    ///
    /// # Errors
    /// `InvalidArgument` if nothing is staged. Errors of the persist are the ticket's.
    pub fn seal(&self, interrupt: Interrupt<'_>) -> Result<Ticket> {
        self.core.check_open()?;
        {
            let mut inner = lock(&self.inner);
            self.check_stage(&inner)?;
            if inner.files.is_empty() {
                return Err(self.refuse(format!("nothing is staged under {}; stage a file first", self.tag)));
            }
            if matches!(inner.generation, Held::Out) {
                return Err(self.busy());
            }
            inner.stage = Stage::Sealing;
        }
        let slot = match self.seal_slot(interrupt) {
            Ok(slot) => slot,
            Err(error) => {
                lock(&self.inner).stage = Stage::Open;
                return Err(error);
            }
        };
        let (ticket, wait) = self.submit(slot);
        if wait {
            ticket.wait(None, interrupt)?;
        }
        Ok(ticket)
    }

    /// Gives the share up: nothing of it is kept, what was committed before stays.
    pub fn abandon(&self) {
        let mut inner = lock(&self.inner);
        if inner.stage != Stage::Open {
            return;
        }
        inner.stage = Stage::Ended;
        for file in inner.files.drain(..) {
            if let Place::Memory(image) = file.place {
                image.image.release();
            }
        }
        let generation = std::mem::replace(&mut inner.generation, Held::None);
        let begun = inner.begun.take();
        drop(inner);
        drop(begun);
        // Its files are removed; one that is out goes when its writer puts it back.
        drop(generation);
        self.core.changed.notify_all();
    }

    /// The record of the seal, with numbers that are as long as any.
    fn blank_seal(&self) -> (TagRecord, bool) {
        let inner = lock(&self.inner);
        let mut slots = Vec::new();
        let mut lasting = true;
        for file in &inner.files {
            match &file.place {
                Place::Memory(image) => {
                    slots.push(image.image.slot() as u32);
                    lasting &= image.memory == MemoryKind::Shared;
                }
                Place::Durable(_) => lasting = false,
            }
        }
        let record = TagRecord {
            root: self.root.store.path().display().to_string(),
            tag: self.tag.clone(),
            step: self.options.step.or_else(|| names::step_of_tag(&self.tag)),
            run: u64::MAX,
            sequence: u64::MAX,
            share: self.number,
            slots,
            meta: self.options.meta.clone(),
            sealed_at: self.core.now_text(),
            writer: self.core.writer(self.options.rank),
            world_size: self.options.world_size,
            best: self.options.best,
            // `check` has seen that it fits.
            keep: self.options.keep.map(|keep| keep as u32),
        };
        (record, lasting)
    }

    /// Room for the seal, taken while the caller can still be asked for an interrupt.
    fn seal_slot(&self, interrupt: Interrupt<'_>) -> Result<Room> {
        let (record, lasting) = self.blank_seal();
        if !lasting {
            return Ok(Room::None);
        }
        let meta_len = record_bytes(&SlotRecord::Tag(record))?.len();
        let (room, _) = self.core.allocate(0, meta_len, &mut || Ok(false), interrupt)?;
        if matches!(room, Room::None) {
            let text =
                format!("{} is staged, but there is no memory to seal it: it does not outlive this process", self.tag);
            self.core.events.log_tag(Level::Warning, self.root.store.path(), &self.tag, text);
        }
        Ok(room)
    }

    /// Number, seal, queue: in one go, so that sequence numbers and commits have one order.
    fn submit(&self, slot: Room) -> (Ticket, bool) {
        let (mut record, _) = self.blank_seal();
        let _order = lock(&self.root.sealing);
        let (run, sequence) = lock(&self.core.state).staged.highest(self.root.store.path());
        self.root.saw(run, sequence);
        (record.run, record.sequence) = self.root.next_numbers();
        let seal = match slot {
            Room::Memory { image, .. } => {
                let published = record_bytes(&SlotRecord::Tag(record.clone()))
                    .and_then(|meta| image.publish(&meta).map_err(crate::engine::memory_error));
                published
                    .map_err(|error| {
                        self.core.events.log(Level::Warning, format!("{} is not sealed: {error}", self.tag))
                    })
                    .ok()
            }
            Room::None => None,
        };
        let mut images = Vec::new();
        let mut durable = Vec::new();
        let mut inner = lock(&self.inner);
        inner.stage = Stage::Ended;
        for file in inner.files.drain(..) {
            match file.place {
                Place::Memory(image) => images.push(image),
                Place::Durable(record) => durable.push(record),
            }
        }
        let generation = std::mem::replace(&mut inner.generation, Held::None);
        let begun = inner.begun.take();
        drop(inner);
        let spilled = match generation {
            Held::Here(generation) if !durable.is_empty() => Some(Spilled { generation: *generation, files: durable }),
            _ => None,
        };
        let partial = spilled.is_some();
        let root = self.root.store.path().to_path_buf();
        let staged = Arc::new(Staged {
            purpose: Purpose::Tag { root, record: Box::new(record), seal },
            images,
            adopted: None,
            partial,
        });
        let ticket = self.core.submit(staged, Some(Arc::clone(&self.root)), spilled);
        // Not before: from here on the memory tier has the tag.
        drop(begun);
        (ticket, partial)
    }

    /// Makes room: persists the oldest of our own files, which nothing else would ever move out of the way.
    fn spill_oldest(&self) -> Result<bool> {
        let oldest = lock(&self.inner).files.iter().find_map(|file| match &file.place {
            Place::Memory(image) => Some((file.name.clone(), Arc::clone(image))),
            Place::Durable(_) => None,
        });
        let Some((name, image)) = oldest else { return Ok(false) };
        let record = self.in_generation(|generation| {
            let record = image.record.as_file(generation.number(), self.options.rank);
            let mut pending = generation.create_file(&record.path)?;
            pending.reserve(record.bytes)?;
            pending.write_pieces(0, image.image.bytes(), &mut |_| {})?;
            pending.finish()?;
            Ok(record)
        })?;
        let text = format!("{name} of {} is persisted early: the memory tier has no room for the rest", self.tag);
        self.core.events.log_tag(Level::Info, self.root.store.path(), &self.tag, text);
        let mut inner = lock(&self.inner);
        let same = |file: &&mut ShareFile| matches!(&file.place, Place::Memory(now) if Arc::ptr_eq(now, &image));
        if let Some(file) = inner.files.iter_mut().find(same) {
            file.place = Place::Durable(record);
        }
        drop(inner);
        image.image.release();
        Ok(true)
    }

    /// Writes a file that memory cannot hold while the caller's tensors stand still.
    fn stream(&self, file: &str, plan: &ImagePlan<'_>, compare: bool, interrupt: Interrupt<'_>) -> Result<FileRecord> {
        let started = self.core.clock.monotonic();
        let record = self.in_generation(|generation| {
            let path = names::escape_file_name(file);
            let mut pending = generation.create_file(&path)?;
            let target: PathBuf = pending.target().to_path_buf();
            let sums = pending
                .reserve(plan.total_len())
                .and_then(|()| stream_image(plan, self.core.copier(interrupt), pending, End::NameLater, compare))
                .map_err(|error| with_need(error, self.core.disk.as_ref(), &target, plan.total_len()))?;
            Ok(FileRecord {
                name: file.to_owned(),
                path,
                generation: generation.number(),
                bytes: plan.total_len(),
                crc32: sums.crc32,
                chunk_bytes: sums.chunk_bytes,
                chunks: sums.chunks,
                rank: self.options.rank,
                codec: relight_format::manifest::CODEC_NONE.to_owned(),
            })
        })?;
        let seconds = seconds_since(self.core.clock.as_ref(), started);
        let line = self.core.history_line("persist", &self.tag, file, self.options.rank, record.bytes, seconds, "");
        self.core.append_history(&self.root, &line);
        Ok(record)
    }

    /// Works in the share's generation, each try on a new file.
    fn in_generation<T>(&self, mut work: impl FnMut(&Generation) -> Result<T>) -> Result<T> {
        let mut delay = self.core.options.retry_delay;
        let mut attempt = 1;
        loop {
            let result = self.once_in_generation(&mut work);
            let Err(error) = result else { return result };
            let worth_it =
                matches!(error.kind, ErrorKind::StorageFull | ErrorKind::StorageUnavailable | ErrorKind::Conflict);
            if !worth_it || attempt >= self.core.options.attempts_max {
                return Err(error);
            }
            let text = format!("a write for {} failed and is tried again: {error}", self.tag);
            self.core.events.log_tag(Level::Warning, self.root.store.path(), &self.tag, text);
            let line = self.core.history_line("retry", &self.tag, "", self.options.rank, 0, 0.0, &error.message);
            self.core.append_history(&self.root, &line);
            self.core.back_off(delay);
            delay = delay.saturating_mul(2);
            attempt += 1;
        }
    }

    fn once_in_generation<T>(&self, work: &mut impl FnMut(&Generation) -> Result<T>) -> Result<T> {
        let held = std::mem::replace(&mut lock(&self.inner).generation, Held::Out);
        let generation = match held {
            Held::Here(generation) => Ok(generation),
            Held::Out => return Err(self.busy()),
            Held::None => {
                let writer = self.core.writer(self.options.rank);
                self.root.store.tag(&self.tag).and_then(|tag| tag.begin_generation(&writer)).map(Box::new)
            }
        };
        let (result, held) = match generation {
            Ok(generation) => (work(&generation), Held::Here(generation)),
            Err(error) => (Err(error), Held::None),
        };
        let mut inner = lock(&self.inner);
        let ended = inner.stage == Stage::Ended;
        // Abandoned meanwhile: the generation is dropped here, and its files with it.
        inner.generation = if ended { Held::None } else { held };
        result
    }

    fn put(&self, name: &str, place: Place) -> Result<()> {
        let mut inner = lock(&self.inner);
        if let Err(error) = self.check_stage(&inner) {
            if let Place::Memory(image) = place {
                image.image.release();
            }
            return Err(error);
        }
        match inner.files.iter_mut().find(|file| file.name == name) {
            Some(file) => {
                if let Place::Memory(old) = std::mem::replace(&mut file.place, place) {
                    old.image.release();
                }
            }
            None => inner.files.push(ShareFile { name: name.to_owned(), place }),
        }
        Ok(())
    }

    fn check_name(&self, file: &str) -> Result<()> {
        let inner = lock(&self.inner);
        self.check_stage(&inner)?;
        let path = names::escape_file_name(file);
        let folded = names::fold_case(&path);
        let twin = inner.files.iter().find(|other| {
            let other_path = names::escape_file_name(&other.name);
            other.name != file && (other_path == path || names::fold_case(&other_path) == folded)
        });
        match twin {
            None => Ok(()),
            Some(twin) => {
                let text = format!("{file} and {} would be one file where case is ignored; rename one", twin.name);
                Err(self.refuse(text))
            }
        }
    }

    fn check_stage(&self, inner: &Inner) -> Result<()> {
        match inner.stage {
            Stage::Open => Ok(()),
            Stage::Sealing => Err(self.busy()),
            Stage::Ended => Err(self.refuse(format!("this save of {} has ended; begin a new one", self.tag))),
        }
    }

    fn busy(&self) -> Error {
        let text =
            format!("another thread is at work in this save of {}; wait for it, or begin a save of your own", self.tag);
        Error::new(ErrorKind::Conflict, text).of_tag(&self.tag)
    }

    fn refuse(&self, text: String) -> Error {
        Error::new(ErrorKind::InvalidArgument, text).of_tag(&self.tag)
    }

    fn named(&self, mut error: Error, file: &str) -> Error {
        if error.kind == ErrorKind::Torn {
            error.message = format!("{file} of {}: {}", self.tag, error.message);
        }
        error.of_tag(&self.tag).on_rank(self.options.rank)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.abandon();
    }
}
