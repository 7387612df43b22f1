//! Draws the usage page: the I/O by machine, container, process, file or kind.
use fathom_control::{InsightState, UsageCount};
use ratatui::{
    Frame,
    layout::Rect,
    style::{Color, Style},
    text::{Line, Span},
    widgets::Paragraph,
};

use super::{
    app::App,
    histogram::{horizontal, sparkline},
    model::Operation,
    screen::{Theme, distribution, operation_table, seconds},
};
use crate::{
    output::{
        sheet::wrap,
        table::{Table, TableColumn},
        text::{fold, shorten},
    },
    usage::{
        AccountColumn, Context, Grouping, Groups, Role, UsageEntry, UsageOrder, columns, detail,
        facts, insight, longest, percentile,
    },
};

/// The width of the bars that show a line's share, in characters.
const BAR: usize = 12;
/// The least width of the screen with such bars.
const BAR_FROM: usize = 110;
/// The most lines for the details of the selected line.
const DETAIL_LINES: usize = 2;
/// The least height of the page with these details.
const DETAIL_FROM: u16 = 12;
/// The least height of the page with the line on the guests.
const GUESTS_FROM: u16 = 5;

/// Draws the page.
pub fn draw(frame: &mut Frame<'_>, area: Rect, app: &App, theme: Theme) {
    let room = usize::from(area.width);
    let lines = match (&app.usage.groups, &app.usage.opened) {
        (None, _) => vec![
            Line::default(),
            Line::from(format!("Measuring for {} …", seconds(app.interval.as_secs_f64()))),
        ],
        (Some(groups), Some(entry)) => opened(app, groups, entry, area, theme),
        (Some(groups), None) => {
            let mut lines = Vec::new();
            if area.height >= GUESTS_FROM {
                lines.push(guests(app, room, theme));
            }
            let detail = if area.height < DETAIL_FROM { Vec::new() } else { selected(app, room) };
            let above = lines.len() + 1 + detail.len();
            let left = usize::from(area.height).saturating_sub(above);
            lines.extend(table(app, groups, room, left, theme));
            if !detail.is_empty() {
                let used = lines.len() + detail.len();
                let gap = usize::from(area.height).saturating_sub(used);
                lines.extend((0..gap).map(|_| Line::default()));
                lines.extend(detail.into_iter().map(|line| Line::styled(line, theme.dim())));
            }
            lines
        }
    };
    frame.render_widget(Paragraph::new(lines), area);
}

/// How far the guests in the scope are understood.
fn guests(app: &App, room: usize, theme: Theme) -> Line<'static> {
    let usage = &app.usage;
    let is_shown =
        |name: &str| usage.scope.machine.as_deref().is_none_or(|machine| machine == name);
    let shown: Vec<_> = usage
        .guests
        .iter()
        .filter(|guest| is_shown(&insight::guest_name(guest)))
        .cloned()
        .collect();
    let all = shown.iter().all(|guest| guest.insight.state == InsightState::Attached);
    let text = match &shown[..] {
        [guest] if all => {
            let parts = [insight::summary(&shown), insight::counters(guest)];
            parts.join(" · ").trim_end_matches(" · ").to_owned()
        }
        shown => insight::summary(shown),
    };
    let style = if all && !shown.is_empty() { theme.dim() } else { theme.colour(Color::Yellow) };
    Line::styled(shorten(&text, room), style)
}

/// The details of the selected line.
fn selected(app: &App, room: usize) -> Vec<String> {
    let Some(entry) = app.usage.entry() else { return Vec::new() };
    let text = detail(entry, app.usage.grouping, &app.usage.guests);
    let mut lines = fold(&text, room);
    if lines.len() > DETAIL_LINES {
        lines.truncate(DETAIL_LINES - 1);
        let used: usize = lines.iter().map(String::len).sum();
        lines.push(shorten(&text[used..], room));
    }
    lines
}

fn table(
    app: &App,
    groups: &Groups,
    room: usize,
    height: usize,
    theme: Theme,
) -> Vec<Line<'static>> {
    let usage = &app.usage;
    let columns = columns(usage.grouping, &usage.common(), true);
    let context = Context { seconds: groups.seconds, guests: &usage.guests };
    let order = app.sort.of_accounts();
    let bars = room >= BAR_FROM && order != UsageOrder::Name && order != UsageOrder::Latency;
    let column = |column: &AccountColumn| {
        let is_followed = follows(order, column.order);
        if is_followed { column.column.clone().kept() } else { column.column.clone() }
    };
    let bar = bars.then(|| TableColumn::text("SHARE       "));
    let mut table = Table::new(columns.iter().map(column).chain(bar));
    let total = UsageEntry {
        name: format!("all {}", groups.entries.len()),
        counts: groups.total.clone(),
        ..UsageEntry::default()
    };
    // The heading is above the rows; the total is below them if there is room.
    let summed = app.filter.is_empty() && height > 3;
    let rows = height.saturating_sub(1 + usize::from(summed)).max(1);
    let first = (usage.place() + 1).saturating_sub(rows);
    let shown: Vec<&UsageEntry> = groups.entries.iter().skip(first).take(rows).collect();
    for entry in &shown {
        let bar = bars.then(|| horizontal(share(entry, &total, order), BAR));
        table.row(columns.iter().map(|column| (column.value)(entry, context)).chain(bar));
    }
    let mut lines = Vec::new();
    if groups.entries.is_empty() {
        let text = if app.filter.is_empty() {
            "No I/O in the last interval."
        } else {
            "No line matches the filter; Esc clears it."
        };
        lines.push(Line::styled(text, theme.dim()));
        return lines;
    }
    if summed {
        table.row(
            columns
                .iter()
                .map(|column| match column.role {
                    Role::Name | Role::Number => (column.value)(&total, context),
                    Role::Owner | Role::Detail => String::new(),
                })
                .chain(bars.then(String::new)),
        );
    }
    for (number, cells) in table.cells(Some(room), true).into_iter().enumerate() {
        let entry = number.checked_sub(1).and_then(|place| shown.get(place));
        let is_selected = entry.is_some() && first + number - 1 == usage.place();
        let is_idle = entry.is_some_and(|entry| entry.requests() == 0);
        let mut spans = Vec::new();
        for (position, (at, cell)) in cells.into_iter().enumerate() {
            let column = columns.get(at);
            // The bar keeps its colours: reversed, a full bar would look empty.
            let is_marked = is_selected && column.is_some();
            if position > 0 {
                let gap = if is_marked { theme.selected() } else { Style::new() };
                spans.push(Span::styled("  ", gap));
            }
            let style = match (entry, column.map(|column| column.role)) {
                _ if is_marked => theme.selected(),
                (None, _) if number > 0 => theme.bold(),
                (None, _) if column.is_some_and(|column| follows(order, column.order)) => {
                    theme.bold()
                }
                (None, _) | (Some(_), Some(Role::Detail)) => theme.dim(),
                (Some(_), Some(Role::Owner) | None) => theme.colour(Color::Cyan),
                (Some(_), Some(_)) if is_idle => theme.dim(),
                (Some(_), Some(_)) => Style::new(),
            };
            spans.push(Span::styled(cell, style));
        }
        lines.push(Line::from(spans));
    }
    lines
}

/// Whether the order uses the values of a column.
fn follows(order: UsageOrder, column: Option<UsageOrder>) -> bool {
    let both = order == UsageOrder::Throughput;
    column == Some(order) || both && matches!(column, Some(UsageOrder::Read | UsageOrder::Written))
}

/// An entry's share of the total, in the values of the order.
fn share(entry: &UsageEntry, total: &UsageEntry, order: UsageOrder) -> f64 {
    let value = |entry: &UsageEntry| match order {
        UsageOrder::Throughput => entry.counts.read.bytes + entry.counts.write.bytes,
        UsageOrder::Read => entry.counts.read.bytes,
        UsageOrder::Written => entry.counts.write.bytes,
        UsageOrder::Flushes => entry.counts.flush.requests,
        UsageOrder::Time => entry.time_ns(),
        UsageOrder::Requests | UsageOrder::Latency | UsageOrder::Size | UsageOrder::Name => {
            entry.requests()
        }
    };
    value(entry) as f64 / value(total).max(1) as f64
}

/// All details of a line: its facts, its operations and their latencies.
fn opened(
    app: &App,
    groups: &Groups,
    entry: &UsageEntry,
    area: Rect,
    theme: Theme,
) -> Vec<Line<'static>> {
    let room = usize::from(area.width);
    let mut lines: Vec<Line<'static>> =
        fold(&entry.name, room).into_iter().map(|line| Line::styled(line, theme.bold())).collect();
    lines.push(Line::styled(sparkline(app.usage.history(), room), theme.colour(Color::Cyan)));
    for (name, value) in facts(entry, app.usage.grouping) {
        let value = shorten(&value, room.saturating_sub(14));
        lines.push(Line::from(vec![
            Span::styled(format!("{name:<14}"), theme.dim()),
            Span::raw(value),
        ]));
    }
    if app.usage.grouping == Grouping::Vm {
        if let Some(guest) = insight::guest_of(&app.usage.guests, &entry.name) {
            for text in [insight::long(&guest.insight), insight::counters(guest)] {
                lines.extend(wrap(&text, room).into_iter().map(Line::from));
            }
        }
    }
    lines.push(Line::default());
    let counts = &entry.counts;
    let operations = [
        ("read", &counts.read),
        ("write", &counts.write),
        ("flush", &counts.flush),
        ("other", &counts.other),
    ]
    .map(|(name, count)| operation(name, count, groups.seconds));
    let used: Vec<&Operation> =
        operations.iter().filter(|operation| operation.per_second > 0.0).collect();
    lines.extend(operation_table(&used, room, theme));
    lines.push(Line::default());
    let left = usize::from(area.height).saturating_sub(lines.len() + 1);
    lines.extend(distribution(&used, &[1], room, left, theme));
    lines
}

fn operation(name: &str, count: &UsageCount, seconds: f64) -> Operation {
    Operation {
        name: name.into(),
        per_second: count.requests as f64 / seconds,
        bytes_per_second: count.bytes as f64 / seconds,
        depth: count.latency_sum_ns as f64 / 1e9 / seconds,
        latency_ns_p50: percentile(count, 50.0),
        latency_ns_p99: percentile(count, 99.0),
        latency_ns_max: longest(count),
        errors: 0,
        latency: count.latency.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{app::tests::usage_app, screen::tests::screen};

    #[test]
    fn who_causes_the_io_is_shown_at_any_width() {
        for width in [40, 60, 80, 120, 200] {
            let text = screen(&usage_app(""), width, 14);
            for part in ["/database", "/web", "all 5", "WRITE/S", "shop"] {
                assert!(text.contains(part), "{part} is missing at {width}:\n{text}");
            }
            let text = screen(&usage_app("5"), width, 14);
            for part in ["table.dat", "metadata", "(unknown)", "FILE"] {
                assert!(text.contains(part), "{part} is missing at {width}:\n{text}");
            }
        }
        let text = screen(&usage_app(""), 80, 24);
        for part in ["HOTTEST FILE", "/srv/table.dat", "Linux 6.1.0", "3 Containers", "by IOPS"] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        assert!(screen(&usage_app(""), 120, 24).contains("SHARE"));
    }

    #[test]
    fn a_scope_and_a_file_are_shown_in_full() {
        let text = screen(&usage_app("j\n"), 80, 24);
        assert!(text.contains("shop › /web") && text.contains("/srv/b"), "{text}");
        assert!(!text.contains("CONTAINER"), "{text}");
        let text = screen(&usage_app("j\n\n"), 80, 24);
        for part in ["file system", "ext4 on vda", "container", "OPERATION", "write"] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        let text = screen(&usage_app("/nothing"), 80, 24);
        assert!(
            text.contains("No line matches the filter") && text.contains("Filter: nothing"),
            "{text}"
        );
    }

    #[test]
    fn no_size_is_too_small() {
        for keys in ["", "5", "j\n\n", "2x", "/z\n", "?"] {
            for (width, height) in [(1, 1), (5, 3), (20, 2), (20, 12), (30, 200)] {
                screen(&usage_app(keys), width, height);
            }
        }
    }

    #[test]
    fn the_selected_line_is_always_on_the_screen() {
        for height in 6..20 {
            let text = screen(&usage_app("5jjjjjjjj"), 80, height);
            let selected = usage_app("5jjjjjjjj").usage.entry().map(|entry| entry.name.clone());
            assert!(text.contains(&selected.expect("there is one")), "{height}:\n{text}");
        }
    }
}
