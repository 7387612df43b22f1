//! The link to the centre, if one is configured.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fathom_control::{ErrorBody, ErrorCode, MonitorStatus};
use fathom_monitor::link::{Host, HostOptions};
use fathom_tls::Tls;

use super::Daemon;
use crate::configuration::MonitorOptions;
use crate::events::DiskEvents;
use crate::wiring::refusal;

/// How long the link may take to send its last rows.
const END_TIME_MAX: Duration = Duration::from_secs(1);

/// The link, and its options.
pub(super) struct Monitor {
    options: MonitorOptions,
    name: String,
    host: Mutex<Host>,
}

impl Daemon {
    /// Starts the link to the centre.
    ///
    /// # Errors
    /// If the certificates cannot be used.
    pub(crate) fn start_monitor(
        self: &Arc<Self>,
        options: &MonitorOptions,
    ) -> Result<(), ErrorBody> {
        let refused = |error: std::io::Error| {
            let remedy = "correct [monitor] in the configuration, or remove it";
            refusal(ErrorCode::Failed, format!("no link to the centre: {error}"), remedy)
        };
        let tls =
            options.files().map(|files| Tls::mutual_client(&files)).transpose().map_err(refused)?;
        let of_certificate = tls.as_ref().and_then(Tls::own_name);
        let name = options.name.clone().or(of_certificate).unwrap_or_else(host_name);
        let mut host = HostOptions::new(&name, &options.address);
        host.centre_name.clone_from(&options.centre_name);
        host.tls = tls;
        host.buffer_max = usize::try_from(options.buffer.0).unwrap_or(usize::MAX);
        host.held_max = options.held_max.get();
        if host.tls.is_none() {
            tracing::warn!("events are sent to {} in plain text", options.address);
        }
        let source = Box::new(DiskEvents::new(self));
        let host = Mutex::new(Host::start(host, source).map_err(refused)?);
        let _ = self.monitor.set(Monitor { options: options.clone(), name, host });
        Ok(())
    }

    /// Sends the last rows to the centre, and closes the link.
    pub(super) fn end_monitor(&self) {
        if let Some(monitor) = self.monitor.get() {
            monitor.host.lock().unwrap_or_else(PoisonError::into_inner).stop(END_TIME_MAX);
        }
    }

    /// The configuration of the link.
    pub(super) fn monitor_options(&self) -> Option<&MonitorOptions> {
        self.monitor.get().map(|monitor| &monitor.options)
    }

    /// The status of the link.
    pub(crate) fn monitor_status(&self) -> Option<MonitorStatus> {
        let monitor = self.monitor.get()?;
        let link = monitor.host.lock().unwrap_or_else(PoisonError::into_inner).status();
        Some(MonitorStatus {
            address: monitor.options.address.clone(),
            name: monitor.name.clone(),
            tls: monitor.options.files().is_some(),
            state: link.state.name().to_owned(),
            since_unix_time_ns: link.since_unix_ns.max(0) as u64,
            problem: link.problem,
            fragments: link.fragments as u64,
            correction_ns: link.correction_ns,
            connections: link.connections,
            events: link.events,
            sent_bytes: link.sent_bytes,
            waiting_bytes: link.waiting_bytes,
            dropped_events: link.dropped_events,
            dropped_rows: link.dropped_rows,
        })
    }
}

/// The host's name.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "host".into() } else { name.to_owned() }
}
