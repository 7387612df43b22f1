//! The daemon's events for the fragments of the monitor.

use std::sync::{Arc, Weak};
use std::time::Duration;

use fathom_block::Clock;
use fathom_cql::catalog::StreamSchema;
use fathom_monitor::link::{EventItem, EventSource, unix_time_ns};
use fathom_monitor::read::{Batch, WantedStream};
use fathom_monitor::recording::{BLOCK_MAX, BlockReader, Item};
use fathom_monitor::streams;

use super::listener::Listener;
use super::{ListenRequest, StreamSet, subscribe};
use crate::daemon::Daemon;

/// The interval of moments: instants before which all events have been sent.
const PULSE: Duration = Duration::from_millis(6);

/// The events of all disks with taps, collected while the centre needs them.
pub(crate) struct DiskEvents {
    daemon: Weak<Daemon>,
    unix_offset_ns: i64,
    open: Option<Open>,
}

/// An open stream of events.
struct Open {
    listener: Arc<Listener>,
    reader: BlockReader,
    header_read: bool,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.listener.close();
    }
}

impl DiskEvents {
    pub(crate) fn new(daemon: &Arc<Daemon>) -> Self {
        let unix_offset_ns = unix_time_ns() - Clock::System.now_ns() as i64;
        Self { daemon: Arc::downgrade(daemon), unix_offset_ns, open: None }
    }

    fn is_stopping(&self) -> bool {
        self.daemon.upgrade().is_none_or(|daemon| daemon.is_stopping())
    }
}

impl EventSource for DiskEvents {
    fn streams(&self) -> Vec<StreamSchema> {
        streams()
    }

    fn clock_ns(&self) -> i64 {
        Clock::System.now_ns() as i64
    }

    fn unix_offset_ns(&self) -> i64 {
        self.unix_offset_ns
    }

    fn begin(&mut self, wanted: &[WantedStream]) -> Result<(), String> {
        self.open = None;
        let daemon = self.daemon.upgrade().ok_or("the daemon ends")?;
        let names = wanted.iter().map(|stream| stream.schema.name.as_str());
        let request = ListenRequest {
            streams: StreamSet::of(names)?,
            pulse: Some(PULSE),
            ..ListenRequest::default()
        };
        let (listener, header) = subscribe(&daemon, request).map_err(|refused| refused.message)?;
        let reader = BlockReader::of_streams(header, wanted, BLOCK_MAX);
        self.open = Some(Open { listener, reader, header_read: false });
        Ok(())
    }

    fn next(&mut self, batch: &mut Batch) -> Result<Option<EventItem>, String> {
        let damaged = |wrong| format!("a block of the daemon's own events is damaged: {wrong}");
        loop {
            let Some(open) = &mut self.open else { return Ok(None) };
            if open.reader.rows(batch).map_err(damaged)? {
                return Ok(Some(EventItem::Rows));
            }
            let Some(bytes) = open.listener.take() else { return Ok(None) };
            if !std::mem::replace(&mut open.header_read, true) {
                continue;
            }
            match open.reader.open(&bytes).map_err(damaged)? {
                None | Some(Item::Rows) => {}
                Some(Item::Moment(time_ns)) => return Ok(Some(EventItem::Watermark(time_ns))),
                Some(Item::Dropped { count, .. }) => return Ok(Some(EventItem::Dropped(count))),
                Some(Item::End { .. }) => {
                    self.open = None;
                    return if self.is_stopping() {
                        Ok(Some(EventItem::Watermark(self.clock_ns())))
                    } else {
                        Err("the collection of events has ended".into())
                    };
                }
            }
        }
    }

    fn end(&mut self) {
        self.open = None;
    }
}
