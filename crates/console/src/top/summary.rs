//! The totals since the disks were opened, as one table.
use fathom_control::{OperationStatistics, Statistics};

use crate::output::{
    figure, latency, short_bytes,
    style::Style,
    table::{Table, TableColumn},
    text::shorten,
};

/// A line for each disk and operation. Only disks whose name or machine contains `filter` are
/// shown.
pub fn table(statistics: &Statistics, filter: &str, width: Option<usize>) -> String {
    let mut table = Table::new([
        TableColumn::text("DISK").flexible(),
        TableColumn::text("OPERATION"),
        TableColumn::number("REQUESTS"),
        TableColumn::number("BYTES"),
        TableColumn::number("P50"),
        TableColumn::number("P99"),
        TableColumn::number("MAX").importance(1),
        TableColumn::number("ERRORS").importance(2),
    ]);
    let mut figures = Vec::new();
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
        for layer in disk.layers.iter().filter(|layer| layer.figures.iter().any(|f| f.value > 0)) {
            let texts: Vec<String> =
                layer.figures.iter().map(|one| figure(&one.name, one.value)).collect();
            let text = format!("{}  {}: {}", disk.name, layer.layer, texts.join(", "));
            figures.push(width.map_or_else(|| text.clone(), |width| shorten(&text, width)));
        }
    }
    let table = table.render(width, Style::stdout());
    let lines = std::iter::once(table.trim_end().to_owned()).chain(figures);
    lines.collect::<Vec<_>>().join("\n")
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
    use super::super::model::tests::{sample, with_log};
    use super::*;

    #[test]
    fn a_line_for_each_operation_and_one_for_an_idle_disk() {
        let mut statistics = sample(1_000_000_000, &[("root", 1000), ("idle", 0)]);
        statistics.disks[1].operations.clear();
        let text = table(&statistics, "", None);
        assert!(text.lines().count() >= 3 && text.contains("1000") && text.contains('–'), "{text}");
        assert!(!table(&statistics, "IDLE", None).contains("root"));
        let statistics = with_log(statistics, 7);
        let text = table(&statistics, "", None);
        assert!(text.ends_with("\nroot  wal: 1 MiB used, 7 rounds"), "{text}");
        assert!(!table(&statistics, "IDLE", None).contains("wal"));
    }
}
