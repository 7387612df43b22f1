//! The link between many hosts and a centre. Each host runs fragments of queries over its own
//! events and sends the results to the centre, which merges them and runs the rest of the queries.
//!
//! `docs/monitor-wire.md` defines the frames. [`Host`] is a host's side, on a thread of its own;
//! [`Centre`] is the centre's side. Neither waits for the other. A host's buffer is bounded, and
//! the host counts the rows that do not fit. The centre does not wait for slow hosts.

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

/// The default limit of the bytes that wait at a host for the centre.
pub const BUFFER_MAX: usize = 8 << 20;
