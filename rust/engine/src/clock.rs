//! Time as a seam.
//!
//! Owns: the one way to read the time and to wait for it.
//! Must not: decide an order of checkpoints (sequence numbers do; clocks go back).

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Where the engine takes the time from.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Seconds since an arbitrary start; never goes back.
    fn monotonic(&self) -> Duration;
    /// Time since 1970-01-01 UTC, for people; may jump.
    fn wall(&self) -> Duration;
    /// Returns after `duration` has passed on this clock. For back-off only, never to wait for an event.
    fn pause(&self, duration: Duration);
}

/// The machine's clock.
#[derive(Debug)]
pub struct SystemClock {
    start: std::time::Instant,
}

impl SystemClock {
    /// The machine's clock, counting from now.
    #[allow(clippy::disallowed_methods, reason = "this is the real form of the Clock seam")]
    pub fn new() -> Self {
        Self { start: std::time::Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }

    #[allow(clippy::disallowed_methods, reason = "this is the real form of the Clock seam")]
    fn wall(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }

    #[allow(clippy::disallowed_methods, reason = "this is the real form of the Clock seam")]
    fn pause(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

/// `wall` as RFC 3339 in UTC with milliseconds, as `2026-11-29T16:30:41.250Z`.
pub fn rfc3339(wall: Duration) -> String {
    let days = wall.as_secs() / 86_400;
    let (year, month, day) = civil_from_days(days);
    let second = wall.as_secs() % 86_400;
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60,
        wall.subsec_millis()
    )
}

/// Year, month and day of the `days`-th day since 1970-01-01, in the Gregorian calendar.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut rest = days;
    let mut year = 1970;
    while rest >= 365 + u64::from(leap(year)) {
        rest -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    (year, month, rest + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments_are_written_as_rfc_3339() {
        assert_eq!(rfc3339(Duration::ZERO), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(Duration::from_millis(951_782_400_007)), "2000-02-29T00:00:00.007Z");
        assert_eq!(rfc3339(Duration::from_secs(1_798_761_599)), "2026-12-31T23:59:59.000Z");
    }
}
