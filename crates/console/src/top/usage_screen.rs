//! Who causes the I/O, drawn.
use fathom_control::InsightState;
use ratatui::{
    Frame,
    layout::Rect,
    style::{Color, Style},
    text::{Line, Span},
    widgets::Paragraph,
};
use unicode_width::UnicodeWidthStr;

use super::{app::App, model::SortKey, screen::Theme};
use crate::{
    output::{latency, rate, short_number, table::shorten},
    usage::{Entry, Grouping},
};

/// A column of numbers.
struct Column {
    heading: &'static str,
    width: usize,
    sort: SortKey,
    /// Left out below this width of the screen.
    from: u16,
    value: fn(&Entry, f64) -> String,
}

const COLUMNS: &[Column] = &[
    Column {
        heading: "READ/S",
        width: 7,
        sort: SortKey::Iops,
        from: 0,
        value: |entry, seconds| short_number(entry.counts.read.requests as f64 / seconds),
    },
    Column {
        heading: "WRITE/S",
        width: 7,
        sort: SortKey::Iops,
        from: 0,
        value: |entry, seconds| short_number(entry.counts.write.requests as f64 / seconds),
    },
    Column {
        heading: "READ",
        width: 10,
        sort: SortKey::Throughput,
        from: 60,
        value: |entry, seconds| rate(entry.counts.read.bytes as f64 / seconds),
    },
    Column {
        heading: "WRITTEN",
        width: 10,
        sort: SortKey::Throughput,
        from: 60,
        value: |entry, seconds| rate(entry.counts.write.bytes as f64 / seconds),
    },
    Column {
        heading: "LATENCY",
        width: 8,
        sort: SortKey::Latency,
        from: 74,
        value: |entry, _| latency(entry.latency_mean_ns()),
    },
    Column {
        heading: "P99",
        width: 8,
        sort: SortKey::Latency,
        from: 100,
        value: |entry, _| latency(entry.counts.sum().latency.percentile(99.0)),
    },
];

/// Draws the page.
pub fn draw(frame: &mut Frame<'_>, area: Rect, app: &App, theme: Theme) {
    let room = usize::from(area.width);
    let grouping = app.usage.grouping();
    let mut lines = guests(app, room, theme);
    let place = if app.usage.scope.0.is_empty() {
        format!("by {}", grouping.name())
    } else {
        format!("{} › by {}", app.usage.scope.text(), grouping.name())
    };
    lines.push(Line::styled(shorten(&place, room), theme.bold()));
    let Some(groups) = &app.usage.groups else {
        lines.push(Line::from(""));
        lines.push(Line::from(format!(
            "Measuring for {} …",
            super::screen::seconds(app.interval.as_secs_f64())
        )));
        frame.render_widget(Paragraph::new(lines), area);
        return;
    };
    let columns: Vec<&Column> = COLUMNS.iter().filter(|column| area.width >= column.from).collect();
    let numbers: usize = columns.iter().map(|column| column.width + 1).sum();
    let texts = room.saturating_sub(numbers).max(8);
    lines.push(heading(&columns, grouping, texts, app.sort, theme));
    let left = usize::from(area.height).saturating_sub(lines.len()).max(1);
    let first = (app.usage.selected + 1).saturating_sub(left);
    for (index, entry) in groups.entries.iter().enumerate().skip(first).take(left) {
        let mut line = texts_of(entry, grouping, texts, theme);
        for column in &columns {
            let text = format!(" {:>1$}", (column.value)(entry, groups.seconds), column.width);
            line.push_span(Span::raw(text));
        }
        let selected = index == app.usage.selected;
        lines.push(if selected { line.patch_style(theme.selected()) } else { line });
    }
    if groups.entries.is_empty() {
        let text = if app.filter.is_empty() {
            "Nothing was read or written in the last interval."
        } else {
            "Nothing contains that; Esc ends the filter."
        };
        lines.push(Line::styled(text, theme.dim()));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// How far each guest has been understood.
fn guests(app: &App, room: usize, theme: Theme) -> Vec<Line<'static>> {
    let mut lines = vec![Line::default()];
    for guest in app.usage.guests.guests.iter().take(4) {
        let name = if guest.vm.is_empty() { guest.disks.join(", ") } else { guest.vm.clone() };
        let insight = &guest.insight;
        let (text, style) = match insight.state {
            InsightState::Attached => {
                (format!("Linux {}", insight.release), theme.colour(Color::Green))
            }
            state if insight.reason.is_empty() => (state.name().to_owned(), theme.dim()),
            state => (format!("{}: {}", state.name(), insight.reason), theme.colour(Color::Yellow)),
        };
        let name = shorten(&name, room / 3);
        let text = shorten(&text, room.saturating_sub(name.width() + 2));
        lines.push(Line::from(vec![Span::raw(name + "  "), Span::styled(text, style)]));
    }
    let more = app.usage.guests.guests.len().saturating_sub(4);
    if more > 0 {
        lines.push(Line::styled(format!("and {more} more guests"), theme.dim()));
    }
    lines.push(Line::default());
    lines
}

fn heading(
    columns: &[&Column],
    grouping: Grouping,
    texts: usize,
    sort: SortKey,
    theme: Theme,
) -> Line<'static> {
    let style = |bold: bool| if bold { theme.bold() } else { theme.dim() };
    let mut entry = Entry { name: grouping.heading().into(), ..Entry::default() };
    entry.vm = "MACHINE".into();
    entry.container = "CONTAINER".into();
    entry.kind = "KIND".into();
    let mut line = texts_of(&entry, grouping, texts, theme);
    line = line.patch_style(style(sort == SortKey::Name));
    for column in columns {
        let text = format!(" {:>1$}", column.heading, column.width);
        line.push_span(Span::styled(text, style(column.sort == sort)));
    }
    line
}

/// The texts of a line, in so many columns of the screen.
fn texts_of(entry: &Entry, grouping: Grouping, room: usize, theme: Theme) -> Line<'static> {
    // What else there is to say, as far as there is room.
    let mut extras: Vec<(&str, usize, Style)> = Vec::new();
    let dim = theme.dim();
    match grouping {
        Grouping::File => {
            extras.push((&entry.kind, 9, dim));
            extras.push((&entry.container, 18, theme.colour(Color::Cyan)));
            extras.push((&entry.vm, 10, dim));
        }
        Grouping::Process => {
            extras.push((&entry.container, 18, theme.colour(Color::Cyan)));
            extras.push((&entry.vm, 10, dim));
        }
        Grouping::Container | Grouping::Kind => extras.push((&entry.vm, 12, dim)),
        Grouping::Vm => {}
    }
    let mut left = room;
    extras.retain(|(_, width, _)| {
        let fits = left > 24 + width;
        if fits {
            left -= width + 1;
        }
        fits
    });
    let mut spans = vec![Span::raw(fill(&entry.name, left, grouping == Grouping::File))];
    for (text, width, style) in extras {
        spans.push(Span::styled(format!(" {}", fill(text, width, false)), style));
    }
    Line::from(spans)
}

/// The text in exactly so many columns; of a long path the end is kept.
fn fill(text: &str, width: usize, end: bool) -> String {
    let mut text = if text.width() <= width {
        text.to_owned()
    } else if end && width > 1 {
        let mut start = text.len();
        let mut taken = 1;
        for (at, character) in text.char_indices().rev() {
            taken += unicode_width::UnicodeWidthChar::width(character).unwrap_or(0);
            if taken > width {
                break;
            }
            start = at;
        }
        format!("…{}", &text[start..])
    } else {
        shorten(text, width)
    };
    text.push_str(&" ".repeat(width.saturating_sub(text.width())));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_take_exactly_their_room() {
        assert_eq!(fill("/srv/web/index.html", 10, true), "…ndex.html");
        assert_eq!(fill("ab", 4, true), "ab  ");
        assert_eq!(fill("日本語のファイル", 7, true).width(), 7);
        assert_eq!(fill("long text", 5, false).width(), 5);
        assert_eq!(fill("x", 0, true).width(), 0);
    }
}
