//! The link to the centre, if one is configured.

pub(crate) mod feature;
pub(crate) mod metrics;
pub(crate) mod options;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use fathom_control::{ErrorBody, ErrorCode, MonitorStatus};
use fathom_monitor::link::{Host, HostOptions};
use fathom_tls::Tls;
use parking_lot::Mutex;

use crate::daemon::Daemon;
use crate::daemon::refresh::Content;
use crate::daemon::stack::refusal;
use crate::features::events::DiskEvents;
use crate::features::monitor::feature::Link;
use options::MonitorOptions;

/// How long the link may take to send its last rows.
const END_TIME_MAX: Duration = Duration::from_secs(1);

/// The link, and its options.
pub(crate) struct Monitor {
    options: MonitorOptions,
    name: String,
    host: Mutex<Host>,
    /// The content of the files with its certificates.
    keys: Mutex<Content>,
}

impl MonitorOptions {
    fn keys(&self) -> Content {
        Content::of([&self.certificate, &self.key, &self.authority])
    }
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
        let keys = Mutex::new(options.keys());
        let (options_of_host, name) = host_options(options)?;
        if options_of_host.tls.is_none() {
            tracing::warn!("events are sent to {} in plain text", options.address);
        }
        let host = Mutex::new(self.start_host(options_of_host)?);
        let _ =
            self.part::<Link>().monitor.set(Monitor { options: options.clone(), name, host, keys });
        Ok(())
    }

    fn start_host(self: &Arc<Self>, options: HostOptions) -> Result<Host, ErrorBody> {
        Host::start(options, Box::new(DiskEvents::new(self))).map_err(|error| no_link(&error))
    }

    /// Begins the link if there is none because of an error, and begins it again with other
    /// certificates. Returns what was done.
    pub(crate) fn refresh_monitor(
        self: &Arc<Self>,
        options: &MonitorOptions,
    ) -> Result<Option<&'static str>, ErrorBody> {
        let Some(monitor) = self.part::<Link>().monitor.get() else {
            self.start_monitor(options)?;
            return Ok(Some("the link to the centre was begun"));
        };
        let (mut keys, new) = (monitor.keys.lock(), options.keys());
        if *keys == new || monitor.options != *options {
            return Ok(None);
        }
        // The old link stays if the certificates cannot be used.
        let (options_of_host, _) = host_options(options)?;
        let next = self.start_host(options_of_host)?;
        // Outside the lock, because the status is read with it.
        let mut old = std::mem::replace(&mut *monitor.host.lock(), next);
        old.stop(END_TIME_MAX);
        *keys = new;
        Ok(Some("the link to the centre has the certificates of now"))
    }

    /// Sends the last rows to the centre, and closes the link.
    pub(crate) fn end_monitor(&self) {
        if let Some(monitor) = self.part::<Link>().monitor.get() {
            monitor.host.lock().stop(END_TIME_MAX);
        }
    }

    /// The configuration of the link.
    pub(crate) fn monitor_options(&self) -> Option<&MonitorOptions> {
        self.part::<Link>().monitor.get().map(|monitor| &monitor.options)
    }
}

impl Link {
    /// The status of the link, if there is one.
    pub(crate) fn status(&self) -> Option<MonitorStatus> {
        let monitor = self.monitor.get()?;
        let link = monitor.host.lock().status();
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

fn no_link(error: &std::io::Error) -> ErrorBody {
    let remedy = "correct [monitor] in the configuration, or remove it";
    refusal(ErrorCode::Failed, format!("no link to the centre: {error}"), remedy)
}

/// The options of the link, and the name of this host there.
fn host_options(options: &MonitorOptions) -> Result<(HostOptions, String), ErrorBody> {
    let tls = options.files().map(|files| Tls::mutual_client(&files)).transpose();
    let tls = tls.map_err(|error| no_link(&error))?;
    let of_certificate = tls.as_ref().and_then(Tls::own_name);
    let name = options.name.clone().or(of_certificate).unwrap_or_else(host_name);
    let mut host = HostOptions::new(&name, &options.address);
    host.centre_name.clone_from(&options.centre_name);
    host.tls = tls;
    host.buffer_max = usize::try_from(options.buffer.0).unwrap_or(usize::MAX);
    host.held_max = options.held_max.get();
    Ok((host, name))
}

/// The host's name.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "host".into() } else { name.to_owned() }
}
