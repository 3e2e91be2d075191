//! The priority of background threads.
//!
//! Owns: lowering the calling thread's own.
//! Must not: raise any, or touch another thread's.

use std::io;

/// Makes the calling thread yield to the others of this process: its nice value becomes `nice`, 0 to 19. Linux keeps
/// nice values by thread, so the training threads keep theirs.
pub fn lower_this_thread(nice: i32) -> io::Result<()> {
    rustix::process::setpriority_process(None, nice.clamp(0, 19))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_is_lowered() {
        let before = rustix::process::getpriority_process(None).unwrap();
        let lowered = std::thread::spawn(|| {
            lower_this_thread(15).unwrap();
            rustix::process::getpriority_process(None).unwrap()
        })
        .join()
        .unwrap();
        assert_eq!(lowered, 15.max(before));
        assert_eq!(rustix::process::getpriority_process(None).unwrap(), before);
    }
}
