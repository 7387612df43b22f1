//! Waits with a time limit.

use std::time::{Duration, Instant};

use crate::{Error, Result};

/// The time limit for an operation that takes at most `seconds` on an ordinary machine, multiplied
/// by `FATHOM_PATIENCE`.
pub fn patience(seconds: u64) -> Duration {
    let factor =
        std::env::var("FATHOM_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1.0);
    Duration::from_secs(seconds).mul_f64(factor)
}

/// Calls `probe` every 10 ms until it returns a value.
///
/// # Errors
/// After `limit`, with `what` in its text. An error of `probe` is returned immediately.
pub fn until<T>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(answer) = probe()? {
            return Ok(answer);
        }
        if start.elapsed() > limit {
            return Err(Error::new(format!("waited {} s for {what}", limit.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
