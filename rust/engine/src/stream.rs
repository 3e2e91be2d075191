//! Stream: an image passes through two windows to a file; one is filled while the other is written.
//!
//! Owns: the writer thread of one call, and the windows that travel between it and the caller through two rings.
//! Must not: hold more of an image than its windows; leave a file published whose bytes did not all pass.
//! Invariant: the sink is finished only after every byte was written and, where asked, the sources were compared.

use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};

use relight_io::buffer::AlignedBuf;
use relight_io::ring::{self, Consumer, Producer};

use crate::error::{Error, ErrorKind, Result};
use crate::plan::ImagePlan;
use crate::publish::PendingFile;
use crate::stage::{Copier, ImageSums, Stager};
use crate::wait::{POLL, Pulse, lock};

/// Bytes of a window. Two of them are all that a stream holds.
pub(crate) const WINDOW_BYTES: u64 = 8 << 20;
const WINDOWS: usize = 2;

/// How long a failed call waits for its writer to remove the temporary file, in units of `POLL`.
const GOODBYE_POLLS: u32 = 20;

/// How a file ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// File and name are durable.
    Durable,
    /// The file is durable; its directory is synced later, with others.
    NameLater,
    /// Replaced in one step, durable whenever the system writes it.
    NoSync,
}

/// Fills `file` with the image of `plan` and finishes it. The file is given up on any error.
pub(crate) fn stream_image(
    plan: &ImagePlan<'_>,
    copier: Copier<'_>,
    file: PendingFile,
    end: End,
    compare: bool,
) -> Result<ImageSums> {
    let mut stager = Stager::new(plan, copier);
    let window_bytes = plan.total_len().clamp(1, WINDOW_BYTES);
    let mut writer = Writer::start(file, end);
    let filled = fill_windows(&mut stager, &mut writer, copier, window_bytes, compare);
    match filled {
        Ok(()) => Ok(stager.finish()),
        Err(error) => {
            writer.give_up();
            Err(error)
        }
    }
}

fn fill_windows(
    stager: &mut Stager<'_, '_>,
    writer: &mut Writer,
    copier: Copier<'_>,
    window_bytes: u64,
    compare: bool,
) -> Result<()> {
    let mut pulse = Pulse::new(copier.clock, copier.interrupt);
    let mut made = 0;
    let mut offset = 0;
    while stager.left() > 0 {
        let mut window = match writer.written()? {
            Some(window) => window,
            None if made < WINDOWS => match AlignedBuf::new(window_bytes as usize) {
                Ok(window) => {
                    made += 1;
                    window
                }
                Err(cause) if made == 0 => return Err(Error::no_memory(window_bytes, cause)),
                // with fewer windows it is slower and comes to the same end
                Err(_) => {
                    writer.wait(&mut pulse)?;
                    continue;
                }
            },
            None => {
                writer.wait(&mut pulse)?;
                continue;
            }
        };
        let len = stager.left().min(window_bytes) as usize;
        stager.fill(&mut window[..len])?;
        writer.write(Filled { offset, len, window })?;
        offset += len as u64;
    }
    if compare {
        stager.check_sources()?;
    }
    writer.finish(&mut pulse)
}

/// A window with the bytes that belong at `offset`.
struct Filled {
    offset: u64,
    len: usize,
    window: AlignedBuf,
}

enum Command {
    Write(Filled),
    Finish,
}

enum Answer {
    Written(AlignedBuf),
    Finished,
    Failed(Error),
}

type Shelf = Arc<Mutex<Option<(PendingFile, End)>>>;

/// The caller's end of the writer thread. The thread belongs to nobody: a caller that was interrupted while the disk
/// is stuck goes away, and the thread removes the temporary file when the disk lets it.
enum Writer {
    Thread {
        commands: Option<Producer<Command>>,
        answers: Consumer<Answer>,
        thread: JoinHandle<()>,
    },
    /// No thread could be started: the caller writes, fill and write do not overlap.
    Inline {
        file: Option<(PendingFile, End)>,
        window: Option<AlignedBuf>,
    },
}

impl Writer {
    fn start(file: PendingFile, end: End) -> Self {
        // Room for every window and the last word: `push` never waits.
        let (commands, todo) = ring::channel(WINDOWS + 2);
        let (done, answers) = ring::channel(WINDOWS + 2);
        // A thread that cannot be started drops its closure; the file must survive that.
        let shelf: Shelf = Arc::new(Mutex::new(Some((file, end))));
        let caller = thread::current();
        let thread = thread::Builder::new().name("relight-write".to_owned()).spawn({
            let shelf = Arc::clone(&shelf);
            move || {
                if let Some((file, end)) = lock(&shelf).take() {
                    write_windows(todo, done, file, end, &caller);
                }
            }
        });
        match thread {
            Ok(thread) => Self::Thread { commands: Some(commands), answers, thread },
            Err(_) => Self::Inline { file: lock(&shelf).take(), window: None },
        }
    }

    /// A window that has been written, if there is one.
    fn written(&mut self) -> Result<Option<AlignedBuf>> {
        match self {
            Self::Inline { window, .. } => Ok(window.take()),
            Self::Thread { answers, .. } => match answers.try_pop() {
                Some(Answer::Written(window)) => Ok(Some(window)),
                Some(Answer::Failed(error)) => Err(error),
                Some(Answer::Finished) => Err(writer_lost()),
                None => Ok(None),
            },
        }
    }

    fn write(&mut self, filled: Filled) -> Result<()> {
        match self {
            Self::Inline { file, window } => {
                let (file, _) = file.as_mut().ok_or_else(writer_lost)?;
                file.write_at(filled.offset, &filled.window[..filled.len])?;
                *window = Some(filled.window);
                Ok(())
            }
            Self::Thread { .. } => self.push(Command::Write(filled)),
        }
    }

    fn push(&mut self, command: Command) -> Result<()> {
        let Self::Thread { commands: Some(commands), .. } = self else { return Err(writer_lost()) };
        if commands.push(command).is_ok() {
            return Ok(());
        }
        // The thread ended; it said why.
        self.written().and(Err(writer_lost()))
    }

    /// Waits for an answer or an interrupt.
    fn wait(&self, pulse: &mut Pulse<'_>) -> Result<()> {
        let Self::Thread { thread, .. } = self else { return Ok(()) };
        if thread.is_finished() {
            return Err(writer_lost());
        }
        // The writer unparks this thread after each answer; an unpark before the park is not lost.
        thread::park_timeout(POLL);
        pulse.poll()
    }

    fn finish(&mut self, pulse: &mut Pulse<'_>) -> Result<()> {
        if let Self::Inline { file, .. } = self {
            let (file, end) = file.take().ok_or_else(writer_lost)?;
            return finish_file(file, end);
        }
        self.push(Command::Finish)?;
        let Self::Thread { answers, thread, .. } = self else { return Err(writer_lost()) };
        loop {
            // Asked before the answers are looked at: what it pushed before its end is then seen.
            let ended = thread.is_finished();
            match answers.try_pop() {
                Some(Answer::Finished) => return Ok(()),
                Some(Answer::Failed(error)) => return Err(error),
                Some(Answer::Written(_)) => continue,
                None if ended => return Err(writer_lost()),
                None => {
                    thread::park_timeout(POLL);
                    pulse.poll()?;
                }
            }
        }
    }

    /// Drops the file; waits a moment for the writer, so that no temporary file is seen after the call.
    fn give_up(self) {
        if let Self::Thread { commands, answers, thread } = self {
            drop((commands, answers));
            for _ in 0..GOODBYE_POLLS {
                if thread.is_finished() {
                    break;
                }
                // Unparked at the end of the thread; a stuck disk is not waited for.
                thread::park_timeout(POLL);
            }
        }
    }
}

fn writer_lost() -> Error {
    Error::new(ErrorKind::StorageUnavailable, "the writer thread ended before the file was whole; save again")
}

/// The writer thread: until the last word comes, or the caller goes away (then the file is dropped unfinished).
fn write_windows(
    mut todo: Consumer<Command>,
    mut done: Producer<Answer>,
    mut file: PendingFile,
    end: End,
    caller: &Thread,
) {
    let answer = loop {
        let failed = match todo.pop() {
            Some(Command::Write(Filled { offset, len, window })) => match file.write_at(offset, &window[..len]) {
                Ok(()) => {
                    if done.push(Answer::Written(window)).is_err() {
                        break None;
                    }
                    caller.unpark();
                    continue;
                }
                Err(error) => error,
            },
            Some(Command::Finish) => match finish_file(file, end) {
                Ok(()) => {
                    let _ = done.push(Answer::Finished);
                    caller.unpark();
                    return;
                }
                Err(error) => {
                    let _ = done.push(Answer::Failed(error));
                    caller.unpark();
                    return;
                }
            },
            None => break None,
        };
        break Some(failed);
    };
    // The temporary file goes before the error is told.
    drop(file);
    if let Some(error) = answer {
        // Err: the caller went away meanwhile and needs no answer.
        let _ = done.push(Answer::Failed(error));
    }
    caller.unpark();
}

fn finish_file(file: PendingFile, end: End) -> Result<()> {
    match end {
        End::Durable => file.finish_durable(),
        End::NameLater => file.finish(),
        End::NoSync => file.finish_without_sync(),
    }
}
