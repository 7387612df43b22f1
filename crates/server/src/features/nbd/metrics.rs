//! The metrics of NBD listeners.

use fathom_control::ListenerStatus;

use crate::daemon::metrics::{Family, MetricsText};

pub(crate) fn of_listeners(page: &mut MetricsText, listeners: &[ListenerStatus]) {
    let families: [Family<'_, ListenerStatus>; 4] = [
        ("fathom_nbd_connections", "gauge", "NBD connections now.", |l| l.connections),
        ("fathom_nbd_connections_total", "counter", "NBD connections accepted.", |l| {
            l.connections_total
        }),
        (
            "fathom_nbd_refused_total",
            "counter",
            "NBD connections refused because there were too many.",
            |l| l.refused,
        ),
        (
            "fathom_nbd_protocol_errors_total",
            "counter",
            "NBD clients that broke the protocol.",
            |l| l.protocol_errors,
        ),
    ];
    let listeners = listeners.iter();
    page.families(&families, &listeners.map(|l| ([("address", l.address.as_str())], l)));
}
