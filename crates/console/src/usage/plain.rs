//! Accounts as tables.
use fathom_control::{GuestList, InsightState};

use super::group::{Grouping, Groups};
use crate::output::{
    latency, rate, short_bytes, short_number,
    style::Style,
    table::{Column, Table},
};

/// A table of the first `limit` entries: rates where there is an interval, sums otherwise.
pub fn table(groups: &Groups, grouping: Grouping, limit: usize, width: Option<usize>) -> String {
    let rates = groups.seconds > 0.0;
    let heading = |name, sum| if rates { name } else { sum };
    let mut columns = vec![Column::text(grouping.heading()).flexible()];
    if grouping != Grouping::Vm {
        columns.push(Column::text("MACHINE").importance(0));
    }
    if grouping > Grouping::Container && grouping != Grouping::Kind {
        columns.push(Column::text("CONTAINER").flexible().importance(4));
    }
    if grouping == Grouping::File {
        columns.push(Column::text("KIND").importance(1));
    }
    columns.extend([
        Column::number(heading("READ/S", "READS")),
        Column::number(heading("WRITE/S", "WRITES")),
        Column::number("READ").importance(5),
        Column::number("WRITTEN").importance(5),
        Column::number("LATENCY").importance(3),
        Column::number("P99").importance(2),
    ]);
    let mut table = Table::new(columns);
    for entry in groups.entries.iter().take(limit) {
        let counts = &entry.counts;
        let number = |count: u64| {
            if rates {
                short_number(count as f64 / groups.seconds)
            } else {
                short_number(count as f64)
            }
        };
        let bytes = |count: u64| {
            if rates { rate(count as f64 / groups.seconds) } else { short_bytes(count as f64) }
        };
        let mut cells = vec![entry.name.clone()];
        if grouping != Grouping::Vm {
            cells.push(entry.vm.clone());
        }
        if grouping > Grouping::Container && grouping != Grouping::Kind {
            cells.push(entry.container.clone());
        }
        if grouping == Grouping::File {
            cells.push(entry.kind.clone());
        }
        cells.extend([
            number(counts.read.requests),
            number(counts.write.requests),
            bytes(counts.read.bytes),
            bytes(counts.write.bytes),
            latency(entry.latency_mean_ns()),
            latency(counts.sum().latency.percentile(99.0)),
        ]);
        table.row(cells);
    }
    table.render(width, Style::stdout())
}

/// How far each guest has been understood, on one line.
pub fn insight_line(guests: &GuestList) -> String {
    let parts: Vec<String> = guests
        .guests
        .iter()
        .map(|guest| {
            let name = if guest.vm.is_empty() { guest.disks.join(", ") } else { guest.vm.clone() };
            let insight = &guest.insight;
            match insight.state {
                InsightState::Attached => format!("{name}: Linux {}", insight.release),
                _ if insight.reason.is_empty() => format!("{name}: {}", insight.state.name()),
                _ => format!("{name}: {}: {}", insight.state.name(), insight.reason),
            }
        })
        .collect();
    if parts.is_empty() { "no guest is connected".into() } else { parts.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::super::group::{Scope, tests::usage};
    use super::*;
    use crate::top::SortKey;

    #[test]
    fn a_table_fits_and_says_sums_or_rates() {
        for grouping in Grouping::ALL {
            let mut groups = Groups::of(&usage(), 2.0, grouping, &Scope::default());
            groups.sort(SortKey::Iops);
            let text = table(&groups, grouping, 10, Some(80));
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
            assert!(text.contains("WRITE/S"), "{text}");
        }
        let groups = Groups::of(&usage(), 0.0, Grouping::File, &Scope::default());
        let text = table(&groups, Grouping::File, 3, None);
        assert!(text.contains("WRITES") && text.contains("/srv/table.dat"), "{text}");
        assert_eq!(text.lines().count(), 4, "{text}");
    }
}
