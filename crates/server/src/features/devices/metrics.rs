//! The devices beneath the disks.

use fathom_control::{DeviceActivity, DeviceList, DeviceStatus};

use crate::daemon::metrics::{Family, MetricsText};

fn labels(device: &DeviceStatus) -> [(&'static str, &str); 2] {
    [("device", device.name.as_str()), ("kind", device.kind.as_str())]
}

pub(crate) fn of_devices(page: &mut MetricsText, devices: &DeviceList) {
    let families: [Family<'_, DeviceStatus>; 2] = [
        ("fathom_device_disks", "gauge", "Disks with an image on the device.", |device| {
            device.disks.len() as u64
        }),
        ("fathom_device_in_flight", "gauge", "Requests of these disks in flight.", |device| {
            device.in_flight
        }),
    ];
    let all = devices.devices.iter().map(|device| (labels(device), device));
    page.families(&families, &all);
    let families: [Family<'_, DeviceActivity, f64>; 6] = [
        (
            "fathom_device_host_in_flight",
            "gauge",
            "Requests of all programs of the host in flight.",
            |host| host.in_flight as f64,
        ),
        (
            "fathom_device_host_busy_seconds_total",
            "counter",
            "Time during which requests of any program were in flight.",
            |host| host.busy_ms as f64 / 1e3,
        ),
        (
            "fathom_device_host_reads_total",
            "counter",
            "Reads of all programs, after merging.",
            |host| host.reads as f64,
        ),
        (
            "fathom_device_host_writes_total",
            "counter",
            "Writes of all programs, after merging.",
            |host| host.writes as f64,
        ),
        ("fathom_device_host_read_bytes_total", "counter", "Bytes read by all programs.", |host| {
            host.read_bytes as f64
        }),
        (
            "fathom_device_host_written_bytes_total",
            "counter",
            "Bytes written by all programs.",
            |host| host.written_bytes as f64,
        ),
    ];
    let counted = devices.devices.iter();
    let counted = counted.filter_map(|device| Some((labels(device), device.host.as_ref()?)));
    page.families(&families, &counted);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::metrics::assert_documented;

    #[test]
    fn every_metric_is_documented() {
        let host = Some(DeviceActivity::default());
        let devices = vec![DeviceStatus { host, ..DeviceStatus::default() }];
        let mut page = MetricsText::default();
        of_devices(&mut page, &DeviceList { devices, ..DeviceList::default() });
        assert_documented(&page.text);
    }
}
