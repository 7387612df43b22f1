//! The totals since the disks were opened, as one table.
use fathom_control::{OperationStatistics, Statistics};

use crate::output::{
    latency, short_bytes,
    style::Style,
    table::{Column, Table},
};

/// A line for each disk and operation. Only disks whose name or machine contains `filter` are
/// shown.
pub fn table(statistics: &Statistics, filter: &str, width: Option<usize>) -> String {
    let mut table = Table::new([
        Column::text("DISK").flexible(),
        Column::text("OPERATION"),
        Column::number("REQUESTS"),
        Column::number("BYTES"),
        Column::number("P50"),
        Column::number("P99"),
        Column::number("MAX").importance(1),
        Column::number("ERRORS").importance(2),
    ]);
    let filter = filter.to_lowercase();
    let matches = |text: &str| text.to_lowercase().contains(&filter);
    for disk in statistics.disks.iter().filter(|disk| matches(&disk.name) || matches(&disk.vm)) {
        for operation in &disk.operations {
            table.row(row(&disk.name, operation));
        }
        if disk.operations.is_empty() {
            let mut cells = vec![disk.name.clone(), "–".to_owned()];
            cells.resize(8, "–".to_owned());
            table.row(cells);
        }
    }
    table.render(width, Style::stdout())
}

fn row(disk: &str, operation: &OperationStatistics) -> Vec<String> {
    let bytes =
        if operation.bytes > 0 { short_bytes(operation.bytes as f64) } else { "–".into() };
    vec![
        disk.to_owned(),
        operation.operation.clone(),
        operation.count.to_string(),
        bytes,
        latency(operation.latency.percentile(50.0)),
        latency(operation.latency.percentile(99.0)),
        latency(operation.latency.max()),
        operation.errors.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::sample;
    use super::*;

    #[test]
    fn a_line_for_each_operation_and_one_for_an_idle_disk() {
        let mut statistics = sample(1_000_000_000, &[("root", 1000), ("idle", 0)]);
        statistics.disks[1].operations.clear();
        let text = table(&statistics, "", None);
        assert!(text.lines().count() >= 3 && text.contains("1000") && text.contains('–'), "{text}");
        assert!(!table(&statistics, "IDLE", None).contains("root"));
    }
}
