//! Draws the live view.
use fathom_control::Bytes;
use ratatui::{
    Frame,
    layout::{Constraint, Flex, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph},
};
use unicode_width::UnicodeWidthStr;

use super::{
    app::{App, ViewPage},
    columns::{DiskColumn, layout},
    histogram::{PARTS, bars, horizontal, sparkline},
    model::{DiskSample, Interval, Layer, Operation, SortKey},
    usage_screen,
};
use crate::output::{
    latency,
    sheet::wrap,
    short_bytes, short_number,
    text::{clean, shorten, shorten_front},
    time::clock,
};

const KEYS: &[(&str, &str)] = &[
    ("↑ ↓ j k", "select a line"),
    ("Enter →", "open: operations; containers, processes, files"),
    ("Esc ←", "back; clear the filter"),
    ("1 … 6 Tab", "disks; I/O by machine, container, file, …"),
    ("u g", "disks or I/O by source; next grouping"),
    ("x", "all details of a line, with latencies"),
    ("i t d l e n", "order by IOPS, throughput, depth, latency, errors, name"),
    ("r w y", "order by bytes read, written, dirty in guests"),
    ("< >", "order by the previous, next column"),
    ("/", "filter by any name"),
    ("Space p", "pause, resume"),
    ("+ -", "longer, shorter intervals"),
    ("? h", "this help"),
    ("q Ctrl-C", "quit"),
];

/// The names of the tabs, in the order of their keys.
const TABS: [&str; 6] = ["Disks", "Machines", "Containers", "Processes", "Files", "Kinds"];

/// The most dirty files on the page of a disk, the width of their lines without the path, and the
/// lines that are left for the distribution of latencies.
pub(super) const DIRTY_FILES: usize = 5;
const FILE_WIDTH: usize = 24;
const FILES_FROM: usize = 6;

/// The theme: whether colours are used.
#[derive(Clone, Copy)]
pub(super) struct Theme(bool);

impl Theme {
    pub(super) fn colour(self, colour: Color) -> Style {
        if self.0 { Style::new().fg(colour) } else { Style::new() }
    }

    pub(super) fn dim(self) -> Style {
        if self.0 { Style::new().fg(Color::DarkGray) } else { Style::new() }
    }

    pub(super) fn bold(self) -> Style {
        let _ = self;
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(super) fn selected(self) -> Style {
        let _ = self;
        Style::new().add_modifier(Modifier::REVERSED)
    }
}

/// Draws the state.
pub fn draw(frame: &mut Frame<'_>, app: &App, colours: bool) {
    let theme = Theme(colours);
    let [title, tabs, body, footer] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_title(frame, title, app, theme);
    draw_tabs(frame, tabs, app, theme);
    match (&app.page, &app.shown) {
        (ViewPage::Usage, _) => usage_screen::draw(frame, body, app, theme),
        (_, None) => {
            let text = format!("\nMeasuring for {} …", seconds(app.interval.as_secs_f64()));
            frame.render_widget(Paragraph::new(text), body);
        }
        (ViewPage::Disks, Some(interval)) => draw_disks(frame, body, app, interval, theme),
        (ViewPage::Disk(name), Some(_)) => {
            if let Some(disk) = app.disk(name) {
                draw_disk(frame, body, app, disk, theme);
            } else {
                let text = format!("\nThe daemon does not serve {name} any more. Esc goes back.");
                frame.render_widget(Paragraph::new(text), body);
            }
        }
    }
    draw_footer(frame, footer, app, theme);
    if app.help {
        draw_help(frame, theme);
    }
}

pub(super) fn seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.0} ms", seconds * 1e3) } else { format!("{seconds:.0} s") }
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, app: &App, theme: Theme) {
    let sort = match (&app.page, app.sort) {
        (ViewPage::Usage, SortKey::Errors) => SortKey::Iops,
        (ViewPage::Usage, SortKey::Dirty) => SortKey::Written,
        (_, sort) => sort,
    };
    let mut state = vec![seconds(app.interval.as_secs_f64()), format!("by {}", sort.name())];
    if !app.filter.is_empty() && !app.typing {
        state.push(format!("only “{}”", app.filter));
    }
    let usage = app.usage.groups.as_ref().filter(|_| app.page == ViewPage::Usage);
    let time = usage.map(|groups| groups.unix_time_ns);
    let time = time.or_else(|| app.shown.as_ref().map(|shown| shown.unix_time_ns));
    let time = time.map_or_else(String::new, clock);
    state.push(if app.paused { format!("paused at {time}") } else { time });
    let state = state.join(" · ");
    let room = usize::from(area.width);
    let place = match &app.page {
        ViewPage::Usage => app.usage.scope.text(),
        ViewPage::Disks | ViewPage::Disk(_) => String::new(),
    };
    let left = room.saturating_sub("Fathom".width() + state.width() + 2);
    let place = if place.is_empty() || left < 10 {
        String::new()
    } else {
        format!("  {}", shorten_front(&place, left - 2))
    };
    let gap = room.saturating_sub("Fathom".width() + place.width() + state.width());
    // On a narrow terminal the name is omitted.
    let line = if gap == 0 {
        Line::from(shorten(&state, room))
    } else {
        Line::from(vec![
            Span::styled("Fathom", theme.bold()),
            Span::styled(place, theme.colour(Color::Cyan)),
            Span::raw(" ".repeat(gap)),
            Span::styled(state, if app.paused { theme.colour(Color::Yellow) } else { theme.dim() }),
        ])
    };
    frame.render_widget(Paragraph::new(line), area);
}

/// Draws the tabs: without their keys if the terminal is narrow, then only the active tab.
fn draw_tabs(frame: &mut Frame<'_>, area: Rect, app: &App, theme: Theme) {
    let active = app.tab();
    let room = usize::from(area.width);
    let text = |place: usize, long: bool| {
        if long { format!("{} {}", place + 1, TABS[place]) } else { TABS[place].to_owned() }
    };
    let width =
        |long| TABS.iter().enumerate().map(|(at, _)| text(at, long).width() + 2).sum::<usize>();
    let long = width(true) <= room;
    let mut spans = Vec::new();
    for place in 0..TABS.len() {
        let text = text(place, long);
        if place == active {
            spans.push(Span::styled(text, theme.bold().add_modifier(Modifier::UNDERLINED)));
        } else if width(false) <= room {
            spans.push(Span::styled(text, theme.dim()));
        } else {
            continue;
        }
        spans.push(Span::raw("  "));
    }
    frame.render_widget(Paragraph::new(Line::from(spans)), area);
}

fn draw_footer(frame: &mut Frame<'_>, area: Rect, app: &App, theme: Theme) {
    let room = usize::from(area.width);
    let line = if let Some(error) = &app.error {
        let text = format!("No sample: {error}; retrying");
        Line::styled(shorten(&text, room), theme.colour(Color::Red))
    } else if app.typing {
        Line::from(format!("Filter: {}█", app.filter))
    } else if app.page == ViewPage::Disks {
        let text = "? help  Enter operations  u sources  / filter  < > order  Space pause  + - interval  q quit";
        Line::styled(shorten(text, room), theme.dim())
    } else if app.page == ViewPage::Usage && app.usage.opened.is_some() {
        let text = "Esc back  ↑ ↓ other lines  Space pause  + - interval  ? help  q quit";
        Line::styled(shorten(text, room), theme.dim())
    } else if app.page == ViewPage::Usage {
        let text = "? help  Enter open  Esc back  x details  / filter  < > order  Space pause  u disks  q quit";
        Line::styled(shorten(text, room), theme.dim())
    } else {
        let text = "Esc back  ↑ ↓ other disks  Space pause  + - interval  ? help  q quit";
        Line::styled(shorten(text, room), theme.dim())
    };
    frame.render_widget(Paragraph::new(line), area);
}

fn draw_disks(frame: &mut Frame<'_>, area: Rect, app: &App, interval: &Interval, theme: Theme) {
    let names = interval.disks.iter().map(|disk| label(disk).width()).max().unwrap_or(0);
    let (columns, name_width, recent) = layout(area.width.into(), &interval.total, names);

    let heading = |column: &&DiskColumn| {
        let text = format!(" {:>1$}", column.heading, column.width);
        let sorted = column.key.is_some_and(|key| app.sort.is_by(key));
        Span::styled(text, if sorted { theme.bold() } else { theme.dim() })
    };
    let name_style = if app.sort == SortKey::Name { theme.bold() } else { theme.dim() };
    let mut spans = vec![Span::styled(format!("{:<name_width$}", "DISK"), name_style)];
    spans.extend(columns.iter().map(heading));
    if recent > 0 {
        spans.push(Span::styled("  RECENT IOPS", theme.dim()));
    }
    let mut lines = vec![Line::from(spans)];

    let total = DiskSample {
        name: format!("all {}", interval.disks.len()),
        counted: true,
        activity: interval.total.clone(),
        ..DiskSample::default()
    };
    // The lines for disks: the area without the heading, the total and an empty line.
    let room = usize::from(area.height).saturating_sub(3);
    let selected = app.selected_index().unwrap_or(0);
    let first = (selected + 1).saturating_sub(room.max(1));
    for disk in interval.disks.iter().skip(first).take(room) {
        let mut line = row(disk, &columns, name_width, theme);
        if !disk.problems.is_empty() {
            let text = format!("  ! {}", disk.problems());
            line.push_span(Span::styled(text, theme.colour(Color::Red)));
        } else if recent > 0 {
            let text = format!("  {}", sparkline(app.history(&disk.name), recent));
            line.push_span(Span::styled(text, theme.colour(Color::Cyan)));
        }
        let is_selected = app.selected.as_ref() == Some(&disk.name);
        lines.push(if is_selected { line.patch_style(theme.selected()) } else { line });
    }
    if interval.disks.is_empty() {
        let text = if app.filter.is_empty() {
            "The daemon serves no disk: `fathom disk add` adds one."
        } else {
            "No disk matches the filter; Esc clears it."
        };
        lines.push(Line::from(text));
    } else if app.filter.is_empty() {
        lines.push(row(&total, &columns, name_width, theme).patch_style(theme.bold()));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn label(disk: &DiskSample) -> String {
    if disk.vm.is_empty() { disk.name.clone() } else { format!("{} {}", disk.name, disk.vm) }
}

fn row(
    disk: &DiskSample,
    columns: &[&DiskColumn],
    name_width: usize,
    theme: Theme,
) -> Line<'static> {
    let name = shorten(&disk.name, name_width);
    let machine = shorten(&disk.vm, name_width.saturating_sub(name.width() + 1));
    let gap = name_width - name.width() - machine.width();
    let failed = disk.activity.errors > 0 || !disk.problems.is_empty();
    let name_style = if failed { theme.colour(Color::Red) } else { Style::new() };
    let mut spans = vec![Span::styled(name, name_style)];
    if disk.vm.is_empty() || machine.is_empty() {
        spans.push(Span::raw(" ".repeat(gap + machine.width())));
    } else {
        spans.push(Span::styled(format!(" {machine}"), theme.dim()));
        spans.push(Span::raw(" ".repeat(gap - 1)));
    }
    if !disk.counted {
        spans.push(Span::styled(" not measured: it has no tap", theme.dim()));
        return Line::from(spans);
    }
    let idle = disk.activity.iops() <= 0.0;
    for column in columns {
        let text = format!(" {:>1$}", (column.value)(&disk.activity), column.width);
        let style = match column.heading {
            "ERRORS" if failed => theme.colour(Color::Red),
            "HELD" if disk.activity.held > 0 => theme.colour(Color::Yellow),
            "DIRTY" if disk.activity.dirty_bytes.is_some_and(|bytes| bytes > 0) => Style::new(),
            "AWAY" if disk.activity.away_bytes.is_some_and(|bytes| bytes > 0) => Style::new(),
            _ if idle => theme.dim(),
            _ => Style::new(),
        };
        spans.push(Span::styled(text, style));
    }
    Line::from(spans)
}

fn draw_disk(frame: &mut Frame<'_>, area: Rect, app: &App, disk: &DiskSample, theme: Theme) {
    let room = usize::from(area.width);
    let size = Bytes(disk.capacity_bytes).to_string();
    let machine =
        if disk.vm.is_empty() { String::new() } else { format!(" of machine {}", disk.vm) };
    let mut facts = format!("{machine}, {size}, {} in flight", disk.activity.in_flight);
    if disk.activity.held > 0 {
        facts += &format!(", {} held back", disk.activity.held);
    }
    if let Some(dirty) = disk.activity.dirty_bytes {
        facts += &format!(", {} dirty in the guest", Bytes(dirty));
    }
    if let Some(away) = disk.activity.away_bytes {
        facts += &format!(", {} of its memory away", Bytes(away));
    }
    facts += &format!(", {} refused", disk.activity.refused);
    let mut lines = vec![
        Line::from(vec![
            Span::styled(disk.name.clone(), theme.bold()),
            Span::raw(shorten(&facts, room.saturating_sub(disk.name.width()))),
        ]),
        Line::styled(sparkline(app.history(&disk.name), room), theme.colour(Color::Cyan)),
        Line::default(),
    ];
    for problem in &disk.problems {
        let text = format!("! {}: {}", problem.kind.name(), problem.message);
        let text = shorten(&text, room);
        lines.push(Line::styled(text, theme.colour(Color::Red)));
    }
    if !disk.counted {
        lines.push(Line::from("The disk has no tap, so it is not measured."));
    }
    // On a small screen the operations come first.
    let spare = usize::from(area.height).saturating_sub(lines.len() + disk.operations.len() + 2);
    let figures = disk.layers.iter().filter_map(Layer::text).flat_map(|text| wrap(&text, room));
    lines.extend(figures.map(|text| Line::from(shorten(&text, room))).take(spare));
    let used: Vec<&Operation> =
        disk.operations.iter().filter(|operation| operation.per_second > 0.0).collect();
    lines.extend(operation_table(&used, room, theme));
    lines.push(Line::default());
    let left = usize::from(area.height).saturating_sub(lines.len() + FILES_FROM);
    if app.dirty_files.0 == disk.name {
        lines.extend(dirty_files(app, room, left, theme));
    }
    let left = usize::from(area.height).saturating_sub(lines.len() + 1);
    lines.extend(distribution(&used, &PARTS, room, left, theme));
    frame.render_widget(Paragraph::new(lines), area);
}

/// The files of the disk's guest with the most dirty pages, and an empty line.
fn dirty_files(app: &App, room: usize, height: usize, theme: Theme) -> Vec<Line<'static>> {
    let files = app.dirty_files.1.iter().filter(|file| file.dirty_bytes > 0);
    let rows = files.take(DIRTY_FILES.min(height.saturating_sub(2)));
    let rows: Vec<_> = rows
        .map(|file| {
            let path =
                if file.path.is_empty() { format!("({})", file.kind) } else { clean(&file.path) };
            let dirty = Bytes(file.dirty_bytes).to_string();
            let device = clean(&file.device);
            let path = shorten_front(&path, room.saturating_sub(FILE_WIDTH));
            Line::from(shorten(&format!("{dirty:>10}  {device:<10}  {path}"), room))
        })
        .collect();
    if rows.is_empty() {
        return rows;
    }
    let heading = shorten(&format!("{:>10}  {:<10}  FILE OF THE GUEST", "DIRTY", "DEVICE"), room);
    let heading = Line::styled(heading, theme.dim());
    [heading].into_iter().chain(rows).chain([Line::default()]).collect()
}

pub(super) fn operation_table(
    operations: &[&Operation],
    room: usize,
    theme: Theme,
) -> Vec<Line<'static>> {
    if operations.is_empty() {
        return vec![Line::styled("Idle.", theme.dim())];
    }
    let format = |cells: [String; 9]| {
        let widths = [7, 6, 7, 6, 7, 7, 7, 6];
        let mut line = format!("{:<12}", cells[0]);
        for (cell, width) in cells[1..].iter().zip(widths) {
            line += &format!(" {cell:>width$}");
        }
        shorten(line.trim_end(), room)
    };
    let heading = ["OPERATION", "/S", "B/S", "SIZE", "DEPTH", "P50", "P99", "MAX", "ERRORS"];
    let mut lines = vec![Line::styled(format(heading.map(str::to_owned)), theme.dim())];
    for operation in operations {
        let text = format([
            operation.name.clone(),
            short_number(operation.per_second),
            short_bytes(operation.bytes_per_second),
            short_bytes(operation.bytes_per_second / operation.per_second),
            format!("{:.1}", operation.depth),
            latency(operation.latency_ns_p50),
            latency(operation.latency_ns_p99),
            latency(operation.latency_ns_max),
            operation.errors.to_string(),
        ]);
        let failed = operation.errors > 0;
        lines
            .push(Line::styled(text, if failed { theme.colour(Color::Red) } else { Style::new() }));
    }
    lines
}

/// The latencies of up to three operations side by side. Each power of two is divided as finely as
/// `parts` and the room allow.
pub(super) fn distribution(
    operations: &[&Operation],
    parts: &[u32],
    room: usize,
    height: usize,
    theme: Theme,
) -> Vec<Line<'static>> {
    const LABEL: usize = 10;
    const SHARE: usize = 5;
    let mut busiest: Vec<&Operation> = operations.to_vec();
    busiest.sort_by(|left, right| right.per_second.total_cmp(&left.per_second));
    busiest.truncate((room.saturating_sub(LABEL) / 22).clamp(1, 3));
    if busiest.is_empty() || height < 2 {
        return Vec::new();
    }
    let width = room.saturating_sub(LABEL) / busiest.len();
    let latencies: Vec<_> = busiest.iter().map(|operation| &operation.latency).collect();
    let rows = bars(&latencies, parts, height - 1);
    // The longest bar fills its column.
    let longest = rows.iter().flat_map(|bar| &bar.shares).copied().fold(0.0, f64::max);
    let mut heading = vec![Span::styled(format!("{:<LABEL$}", "LATENCY"), theme.dim())];
    for operation in &busiest {
        let text = shorten(&operation.name, width - 1);
        heading.push(Span::styled(format!("{text:<width$}"), theme.dim()));
    }
    let mut lines = vec![Line::from(heading)];
    let colours = [Color::Cyan, Color::Magenta, Color::Yellow];
    for bar in rows {
        let mut spans = vec![Span::raw(format!("{:>1$} ", bar.label, LABEL - 1))];
        for (share, colour) in bar.shares.iter().zip(colours) {
            let block = horizontal(share / longest, width.saturating_sub(SHARE + 2));
            let percent = match share * 100.0 {
                0.0 => String::new(),
                p if p < 0.95 => " <1 %".to_owned(),
                p => format!(" {p:.0} %"),
            };
            let padding = " ".repeat(width.saturating_sub(block.width() + percent.width()));
            spans.push(Span::styled(block, theme.colour(colour)));
            spans.push(Span::raw(percent + &padding));
        }
        lines.push(Line::from(spans));
    }
    lines
}

fn draw_help(frame: &mut Frame<'_>, theme: Theme) {
    let mut lines: Vec<Line<'_>> = KEYS
        .iter()
        .map(|(keys, text)| {
            Line::from(vec![Span::styled(format!(" {keys:<13}"), theme.bold()), Span::raw(*text)])
        })
        .collect();
    lines.push(Line::default());
    lines.push(Line::styled(" Rates and latencies are those of the last interval;", theme.dim()));
    lines.push(Line::styled(" depth is the mean number of requests in flight;", theme.dim()));
    lines.push(Line::styled(
        " P50, P99 and MAX cover reads and writes. Pages 2 to 6 are",
        theme.dim(),
    ));
    lines.push(Line::styled(" from the guests' memory; their P99 is an upper bound.", theme.dim()));
    lines.push(Line::styled(
        " HELD are requests that the layers `limit` and `schedule`",
        theme.dim(),
    ));
    lines.push(Line::styled(
        " hold back now, DIRTY the data that guests have not written,",
        theme.dim(),
    ));
    lines.push(Line::styled(" HIT the share of the reads that caches had wholly.", theme.dim()));
    lines.push(Line::styled(" AWAY is what pagers took out of guests' memory.", theme.dim()));
    // With the frame.
    let height = lines.len() as u16 + 2;
    let width = lines.iter().map(Line::width).max().unwrap_or(0) as u16 + 3;
    let [area] =
        Layout::horizontal([Constraint::Length(width)]).flex(Flex::Center).areas(frame.area());
    let [area] = Layout::vertical([Constraint::Length(height)]).flex(Flex::Center).areas(area);
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" Keys ")), area);
}

#[cfg(test)]
pub(super) mod tests;
