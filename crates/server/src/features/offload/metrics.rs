//! The disks whose load can be carried elsewhere.

use fathom_control::{OffloadDisk, OffloadForecast, OffloadReport};

use crate::daemon::metrics::{Family, MetricsText};

pub(crate) fn of_offload(page: &mut MetricsText, report: &OffloadReport) {
    let families: [Family<'_, OffloadDisk, f64>; 2] = [
        (
            "fathom_offload_starts_total",
            "counter",
            "How often the disk's load has been carried elsewhere.",
            |disk| disk.starts as f64,
        ),
        (
            "fathom_offload_log_used_bytes",
            "gauge",
            "Bytes of the log in use: changes that are not at home.",
            |disk| disk.log_used_bytes as f64,
        ),
    ];
    let disks = report.disks.iter().map(|disk| ([("disk", disk.disk.as_str())], disk));
    page.families(&families, &disks);
    let families: [Family<'_, OffloadForecast, f64>; 9] = [
        ("fathom_offload_peak", "gauge", "1 if a peak is foreseen or observed.", |forecast| {
            f64::from(u8::from(forecast.is_peak))
        }),
        (
            "fathom_offload_arrivals_per_second",
            "gauge",
            "Requests of the disk that arrive at its device in a second.",
            |forecast| forecast.arrivals_per_second,
        ),
        (
            "fathom_offload_observed_mean_seconds",
            "gauge",
            "The mean response time at the device in the last window.",
            |forecast| forecast.observed_mean_ns as f64 / 1e9,
        ),
        (
            "fathom_offload_observed_p90_seconds",
            "gauge",
            "The 90th percentile of the response time in the last window.",
            |forecast| forecast.observed_p90_ns as f64 / 1e9,
        ),
        (
            "fathom_offload_predicted_mean_seconds",
            "gauge",
            "The mean response time with a tenth more requests, by the model.",
            |forecast| forecast.predicted_mean_ns as f64 / 1e9,
        ),
        (
            "fathom_offload_predicted_p90_seconds",
            "gauge",
            "The 90th percentile with a tenth more requests, by the model.",
            |forecast| forecast.predicted_p90_ns as f64 / 1e9,
        ),
        (
            "fathom_offload_low_p90_seconds",
            "gauge",
            "The 90th percentile of the response time at low load.",
            |forecast| forecast.low_p90_ns as f64 / 1e9,
        ),
        (
            "fathom_offload_model_error_ratio",
            "gauge",
            "The mean relative error of the predicted 90th percentile.",
            |forecast| forecast.error,
        ),
        (
            "fathom_offload_parallelism",
            "gauge",
            "The requests that the device serves at a time, as fitted; 0 if that is unknown.",
            |forecast| forecast.parallelism,
        ),
    ];
    let forecasts = report.disks.iter().filter_map(|disk| Some((disk, disk.forecast.as_ref()?)));
    page.families(
        &families,
        &forecasts.map(|(disk, forecast)| ([("disk", disk.disk.as_str())], forecast)),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::metrics::assert_documented;

    #[test]
    fn every_metric_is_documented() {
        let forecast = Some(OffloadForecast::default());
        let disks = vec![OffloadDisk { forecast, ..OffloadDisk::default() }];
        let mut page = MetricsText::default();
        of_offload(&mut page, &OffloadReport { disks, ..OffloadReport::default() });
        assert_documented(&page.text);
    }
}
