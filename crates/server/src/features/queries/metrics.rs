//! Metrics of the kept queries, and the metrics that the queries make.

use fathom_control::{QueryList, QueryState, QueryStatus};

use crate::daemon::metrics::{Family, MetricsText};
use crate::features::queries::MetricSeries;

/// The state of the kept queries.
#[derive(Default)]
pub(crate) struct QueryMetrics {
    /// The status of each query.
    pub list: QueryList,
    /// The metrics that the queries make.
    pub series: Vec<MetricSeries>,
}

pub(crate) fn of_queries(page: &mut MetricsText, queries: &QueryMetrics) {
    let families: [Family<'_, QueryStatus>; 13] = [
        ("fathom_query_running", "gauge", "Whether the query reads events.", |q| {
            u64::from(q.state == QueryState::Running)
        }),
        ("fathom_query_held", "gauge", "Rows, groups and values that the query holds.", |q| q.held),
        ("fathom_query_events_total", "counter", "Events that the query has read.", |q| q.events),
        (
            "fathom_query_events_dropped_total",
            "counter",
            "Events dropped because the query was too slow.",
            |q| q.events_dropped,
        ),
        (
            "fathom_query_events_late_total",
            "counter",
            "Events that arrived after their instant was processed.",
            |q| q.events_late,
        ),
        ("fathom_query_results_total", "counter", "Rows added to the result.", |q| q.results),
        ("fathom_query_results_gone_total", "counter", "Rows removed from the result.", |q| {
            q.results_gone
        }),
        (
            "fathom_query_acted_total",
            "counter",
            "Changes for which the action was carried out.",
            |q| q.acted,
        ),
        (
            "fathom_query_suppressed_total",
            "counter",
            "Changes suppressed by the action's limit.",
            |q| q.suppressed,
        ),
        (
            "fathom_query_lost_total",
            "counter",
            "Changes whose action failed permanently or did not fit the queue.",
            |q| q.lost,
        ),
        ("fathom_query_failures_total", "counter", "Attempts of the action that failed.", |q| {
            q.failures
        }),
        ("fathom_query_series", "gauge", "Series of the query's metric.", |q| q.series),
        (
            "fathom_query_series_left_out",
            "gauge",
            "Rows without a series of the query's metric, because there are too many.",
            |q| q.series_left_out,
        ),
    ];
    let list = queries.list.queries.iter();
    page.families(&families, &list.map(|query| ([("query", query.name.as_str())], query)));
    queries.series.iter().for_each(|series| of_series(page, series));
}

fn of_series(page: &mut MetricsText, series: &MetricSeries) {
    let help = series.help.replace('\\', "\\\\").replace('\n', "\\n");
    page.family(&series.name, series.kind, &help);
    for (values, value) in &series.samples {
        let names = series.labels.iter().map(String::as_str);
        let labels: Vec<(&str, &str)> = names.zip(values.iter().map(String::as_str)).collect();
        page.sample(&series.name, &labels, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_texts_and_labels_of_queries_are_escaped() {
        let series = MetricSeries {
            name: "slow".into(),
            kind: "gauge",
            help: "a\nb\\".into(),
            labels: vec!["disk".into(), "path".into()],
            samples: vec![(vec!["a\"\n".into(), "\\".into()], "7".into())],
        };
        let queries = QueryMetrics { series: vec![series], ..QueryMetrics::default() };
        let mut page = MetricsText::default();
        of_queries(&mut page, &queries);
        let wanted = "# HELP slow a\\nb\\\\\n# TYPE slow gauge\n\
                      slow{disk=\"a\\\"\\n\",path=\"\\\\\"} 7\n";
        assert!(page.text.ends_with(wanted), "{}", page.text);
    }
}
