//! Many hosts: each runs fragments of queries over its own events and sends what results to a
//! centre, which merges it and runs the rest.
//!
//! `docs/monitor-wire.md` draws what is sent. [`Host`] is a host's side, on a thread of its own;
//! [`Centre`] is the other. Neither waits for the other: a host's buffer is bounded and what finds
//! no room in it is counted, and the centre leaves out who lags.

mod centre;
mod channel;
mod clock;
mod frame;
#[doc(hidden)]
pub mod fuzz;
mod host;
mod plans;
mod rows;

pub(crate) use channel::{Channel, host_of, is_wait, prepare, reach};

pub use centre::{Centre, CentreOptions, CentreStatus, HostState, HostStatus, Refusal, Watch};
pub use clock::{Measurement, unix_time_ns};
pub use host::{EventItem, EventSource, Host, HostOptions, LinkState, LinkStatus};

/// The most bytes that wait at a host for the centre, unless said otherwise.
pub const BUFFER_MAX: usize = 8 << 20;
