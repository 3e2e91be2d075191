//! A clock that stands still until a test moves it.
//!
//! Owns: the simulated form of the `Clock` seam.
//! Must not: read the machine's time, or wait.

use std::sync::Mutex;
use std::time::Duration;

use relight_engine::clock::Clock;

/// Time as the test sets it; `pause` returns at once and moves it.
#[derive(Debug, Default)]
pub struct ManualClock {
    times: Mutex<Times>,
}

#[derive(Debug, Default)]
struct Times {
    monotonic: Duration,
    wall: Duration,
    pauses: Vec<Duration>,
}

impl ManualClock {
    /// A clock whose wall time is `wall` after 1970-01-01 UTC.
    pub fn new(wall: Duration) -> Self {
        Self { times: Mutex::new(Times { wall, ..Times::default() }) }
    }

    /// Moves both times on.
    pub fn advance(&self, by: Duration) {
        let mut times = self.times.lock().unwrap();
        times.monotonic += by;
        times.wall += by;
    }

    /// Sets the wall time, also back.
    pub fn set_wall(&self, wall: Duration) {
        self.times.lock().unwrap().wall = wall;
    }

    /// What `pause` was asked for, in order.
    pub fn pauses(&self) -> Vec<Duration> {
        self.times.lock().unwrap().pauses.clone()
    }
}

impl Clock for ManualClock {
    fn monotonic(&self) -> Duration {
        self.times.lock().unwrap().monotonic
    }

    fn wall(&self) -> Duration {
        self.times.lock().unwrap().wall
    }

    fn pause(&self, duration: Duration) {
        self.times.lock().unwrap().pauses.push(duration);
        self.advance(duration);
    }
}
