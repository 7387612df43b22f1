//! The daemon's part in the collection of events.

use std::sync::Arc;
use std::time::Duration;

use fathom_control::{ErrorBody, ErrorCode, RecordingQuery};
use fathom_insight::Names;
use fathom_layers::Tap;

use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, status};
use crate::features::events::{EventBody, Events, ListenRequest, StreamSet, listen};
use crate::features::guests::Introspection;

/// The remedy for parameters of a recording that are not valid.
const RECORDING: &str = "use a path like /v1/recording?disk=NAME&disk=NAME&stream=NAME&pulse_ms=20";

impl Daemon {
    /// Begins a recording. Waits until the collection has begun.
    pub(crate) fn record(self: &Arc<Self>, query: RecordingQuery) -> Result<EventBody, ErrorBody> {
        if let Some(time) = query.pulse_ms.filter(|time| !(1..=60_000).contains(time)) {
            return Err(refusal(
                ErrorCode::Invalid,
                format!("pulse_ms is {time}, but must be from 1 to 60000"),
                RECORDING,
            ));
        }
        let disks = query.disk.into_iter().collect();
        let pulse = query.pulse_ms.map(Duration::from_millis);
        let mut request = ListenRequest { disks, pulse, ..ListenRequest::default() };
        if !query.stream.is_empty() {
            let names = query.stream.iter().map(String::as_str);
            request.streams = StreamSet::of(names)
                .map_err(|message| refusal(ErrorCode::Invalid, message, RECORDING))?;
        }
        listen(self, request)
    }

    /// The event listeners.
    pub(crate) fn events(&self) -> &Events {
        self.part::<Events>()
    }

    /// The texts of the numbers in events.
    pub(crate) fn names(&self) -> &Arc<Names> {
        self.part::<Arc<Introspection>>().names()
    }

    /// The tap of a disk, if it has one.
    pub(crate) fn tap_of(&self, name: &str) -> Result<Option<Tap>, ErrorBody> {
        Ok(self.find(name)?.part::<Tap>())
    }

    /// The taps of all disks that have one, with the disks' names.
    pub(crate) fn taps(&self) -> Vec<(String, Tap)> {
        let tap = |served: Arc<crate::daemon::Served>| {
            let tap = served.part::<Tap>()?;
            Some((served.disk.name().to_owned(), tap))
        };
        self.served().into_iter().filter_map(tap).collect()
    }

    /// Nanoseconds since 1970.
    #[allow(clippy::unused_self, reason = "it is the daemon's time")]
    pub(crate) fn unix_time_ns(&self) -> u64 {
        status::unix_time_ns()
    }
}
