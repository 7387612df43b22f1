//! The background work of the disks' layers.

use fathom_control::{BackgroundDevice, BackgroundList};

use crate::daemon::metrics::{Family, MetricsText};

pub(crate) fn of_background(page: &mut MetricsText, background: &BackgroundList) {
    let families: [Family<'_, BackgroundDevice, f64>; 10] = [
        ("fathom_background_waiting_bytes", "gauge", "Bytes of work that waits.", |device| {
            device.waiting.iter().map(|work| work.bytes as f64).sum()
        }),
        ("fathom_background_steps_total", "counter", "Steps of work.", |d| d.steps as f64),
        (
            "fathom_background_forced_steps_total",
            "counter",
            "Steps that began because of their deadline.",
            |device| device.forced_steps as f64,
        ),
        ("fathom_background_bytes_total", "counter", "Bytes of the steps.", |d| d.bytes as f64),
        (
            "fathom_background_idle_seconds_total",
            "counter",
            "Time without guests' requests in flight at the device.",
            |device| device.idle_ns as f64 / 1e9,
        ),
        (
            "fathom_background_busy_seconds_total",
            "counter",
            "Time with guests' requests in flight at the device.",
            |device| device.busy_ns as f64 / 1e9,
        ),
        (
            "fathom_background_offered_seconds_total",
            "counter",
            "Idle time while work waited or ran.",
            |device| device.offered_ns as f64 / 1e9,
        ),
        (
            "fathom_background_used_seconds_total",
            "counter",
            "Idle time during which a step ran.",
            |device| device.used_ns as f64 / 1e9,
        ),
        (
            "fathom_background_met_requests_total",
            "counter",
            "Guests' requests that came during a step.",
            |device| device.met_requests as f64,
        ),
        (
            "fathom_background_met_seconds_total",
            "counter",
            "How long steps still took after a request came.",
            |device| device.met_ns as f64 / 1e9,
        ),
    ];
    let names: Vec<String> =
        background.devices.iter().map(|device| device.devices.join(" ")).collect();
    let devices = names.iter().zip(&background.devices);
    page.families(&families, &devices.map(|(name, device)| ([("device", name.as_str())], device)));
}
