//! Metrics of the link to the centre.

use fathom_control::MonitorStatus;

use crate::daemon::metrics::{Family, MetricsText};

/// Writes the metrics of the link.
pub(crate) fn of_monitor(page: &mut MetricsText, monitor: &MonitorStatus) {
    let families: [Family<'_, MonitorStatus>; 7] = [
        ("fathom_monitor_running", "gauge", "Whether the centre's fragments run.", |m| {
            u64::from(m.state == "running")
        }),
        ("fathom_monitor_connections_total", "counter", "Connections to the centre.", |m| {
            m.connections
        }),
        ("fathom_monitor_events_total", "counter", "Events read by the fragments.", |m| m.events),
        ("fathom_monitor_sent_bytes_total", "counter", "Bytes sent to the centre.", |m| {
            m.sent_bytes
        }),
        ("fathom_monitor_waiting_bytes", "gauge", "Bytes that wait for the centre.", |m| {
            m.waiting_bytes
        }),
        (
            "fathom_monitor_dropped_events_total",
            "counter",
            "Events dropped before the fragments.",
            |m| m.dropped_events,
        ),
        ("fathom_monitor_dropped_rows_total", "counter", "Rows that were not sent.", |m| {
            m.dropped_rows
        }),
    ];
    page.families(&families, &std::iter::once(([], monitor)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::metrics::assert_documented;

    #[test]
    fn every_metric_is_documented() {
        let mut page = MetricsText::default();
        of_monitor(&mut page, &MonitorStatus::default());
        assert_documented(&page.text);
    }
}
