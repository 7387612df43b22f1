//! Tables of accounts.
use fathom_control::{Bytes, GuestInfo};

use super::{
    entry::UsageEntry,
    group::{Grouping, Groups, Scope, UsageOrder, container_name},
    insight,
};
use crate::output::{
    latency, short_bytes, short_number,
    style::Style,
    table::{Table, TableColumn},
    text::clean,
};

/// Context for the cells of a line.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The length of the interval, in seconds; 0 for all time.
    pub seconds: f64,
    /// The daemon's guests.
    pub guests: &'a [GuestInfo],
}

/// The role of a column, which determines the style of its cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The name of the line.
    Name,
    /// The owner of the line.
    Owner,
    /// Additional information.
    Detail,
    /// A number.
    Number,
}

/// A column of accounts.
pub struct AccountColumn {
    /// Its heading and layout.
    pub column: TableColumn,
    /// The order by this column.
    pub order: Option<UsageOrder>,
    /// Its role.
    pub role: Role,
    /// The text of a cell.
    pub value: fn(&UsageEntry, Context<'_>) -> String,
}

/// The columns of a grouping. Properties that `scope` fixes for all lines have no column.
pub fn columns(grouping: Grouping, scope: &Scope, rates: bool) -> Vec<AccountColumn> {
    let text = |column, role, value| AccountColumn { column, order: None, role, value };
    let name = TableColumn::text(grouping.heading());
    let name = match grouping {
        Grouping::File | Grouping::Database => name.flexible_path(18),
        _ => name.flexible_to(10),
    };
    let mut columns = vec![AccountColumn {
        order: Some(UsageOrder::Name),
        ..text(name, Role::Name, |entry, _| entry.name.clone())
    }];
    if grouping > Grouping::Container && grouping != Grouping::Kind && scope.container.is_none() {
        let column = TableColumn::text("CONTAINER").flexible_to(9).importance(10);
        columns.push(text(column, Role::Owner, |entry, _| entry.container_text()));
    }
    if grouping == Grouping::File && scope.process.is_none() {
        let column = TableColumn::text("PROCESS").flexible().optional().importance(2);
        let value = |entry: &UsageEntry, _: Context<'_>| entry.process.text(str::to_owned);
        columns.push(text(column, Role::Detail, value));
    }
    if grouping != Grouping::Vm && grouping != Grouping::Kind && scope.machine.is_none() {
        let column = TableColumn::text("MACHINE").flexible_to(6).importance(4);
        let value = |entry: &UsageEntry, _: Context<'_>| entry.machine.text(str::to_owned);
        columns.push(text(column, Role::Detail, value));
    }
    if grouping == Grouping::File && scope.kind.is_none() {
        let column = TableColumn::text("KIND").importance(5);
        columns.push(text(column, Role::Detail, |entry, _| entry.kind.text(str::to_owned)));
    }
    if grouping == Grouping::Vm {
        let column = TableColumn::text("INSIGHT").flexible_to(9).importance(9);
        columns.push(text(column, Role::Detail, |entry, context| {
            let guest = insight::guest_of(context.guests, &entry.name);
            guest.map_or_else(|| "no guest".into(), |guest| insight::short(&guest.insight))
        }));
    }
    if !matches!(grouping, Grouping::File | Grouping::Database) {
        let column = TableColumn::text("HOTTEST FILE").flexible_path(16).importance(6);
        let value = |entry: &UsageEntry, _: Context<'_>| entry.hottest.clone().unwrap_or_default();
        columns.push(text(column, Role::Detail, value));
    }
    columns.extend(if rates { rate_columns() } else { sum_columns(grouping) });
    columns.push(number(TableColumn::number("HIT").optional().importance(0), None, |entry, _| {
        let ratio = entry.counts.read.hit_ratio();
        ratio.map_or_else(String::new, |ratio| format!("{:.0} %", ratio * 100.0))
    }));
    columns.extend(latency_columns());
    columns
}

fn number(
    column: TableColumn,
    order: Option<UsageOrder>,
    value: fn(&UsageEntry, Context<'_>) -> String,
) -> AccountColumn {
    AccountColumn { column, order, role: Role::Number, value }
}

fn rate_columns() -> Vec<AccountColumn> {
    vec![
        number(TableColumn::number("READ/S"), Some(UsageOrder::Requests), |entry, context| {
            short_number(entry.counts.read.requests as f64 / context.seconds)
        }),
        number(TableColumn::number("WRITE/S"), Some(UsageOrder::Requests), |entry, context| {
            short_number(entry.counts.write.requests as f64 / context.seconds)
        }),
        number(
            TableColumn::number("READ B/S").importance(7),
            Some(UsageOrder::Read),
            |entry, context| short_bytes(entry.counts.read.bytes as f64 / context.seconds),
        ),
        number(
            TableColumn::number("WRITE B/S").importance(7),
            Some(UsageOrder::Written),
            |entry, context| short_bytes(entry.counts.write.bytes as f64 / context.seconds),
        ),
        number(
            TableColumn::number("FLUSH/S").importance(3),
            Some(UsageOrder::Flushes),
            |entry, context| short_number(entry.counts.flush.requests as f64 / context.seconds),
        ),
        number(TableColumn::number("OTHER/S").importance(1), None, |entry, context| {
            short_number(entry.counts.other.requests as f64 / context.seconds)
        }),
        number(
            TableColumn::number("DEPTH").importance(1),
            Some(UsageOrder::Time),
            |entry, context| format!("{:.1}", entry.time_ns() as f64 / 1e9 / context.seconds),
        ),
    ]
}

fn sum_columns(grouping: Grouping) -> Vec<AccountColumn> {
    let mut columns = vec![
        number(TableColumn::number("READS"), Some(UsageOrder::Requests), |entry, _| {
            short_number(entry.counts.read.requests as f64)
        }),
        number(TableColumn::number("WRITES"), Some(UsageOrder::Requests), |entry, _| {
            short_number(entry.counts.write.requests as f64)
        }),
        number(TableColumn::number("READ").importance(7), Some(UsageOrder::Read), |entry, _| {
            short_bytes(entry.counts.read.bytes as f64)
        }),
        number(
            TableColumn::number("WRITTEN").importance(7),
            Some(UsageOrder::Written),
            |entry, _| short_bytes(entry.counts.write.bytes as f64),
        ),
        number(
            TableColumn::number("FLUSHES").importance(3),
            Some(UsageOrder::Flushes),
            |entry, _| short_number(entry.counts.flush.requests as f64),
        ),
    ];
    if grouping == Grouping::File {
        columns.push(number(
            TableColumn::number("SIZE").importance(3),
            Some(UsageOrder::Size),
            |entry, _| {
                let size = entry.file.as_ref().map_or(0, |file| file.size_bytes);
                if size == 0 { "–".into() } else { Bytes(size).to_string() }
            },
        ));
    }
    columns
}

fn latency_columns() -> Vec<AccountColumn> {
    vec![
        number(TableColumn::number("MEAN").importance(8), Some(UsageOrder::Latency), |entry, _| {
            latency(entry.latency_mean_ns())
        }),
        number(TableColumn::number("P99").importance(3), None, |entry, _| {
            latency(entry.latency_p99_ns())
        }),
    ]
}

/// A table of the first `limit` entries: rates for an interval, else sums. Properties in `common`
/// are the same for all lines and have no column.
pub fn table(
    groups: &Groups,
    grouping: Grouping,
    common: &Scope,
    guests: &[GuestInfo],
    limit: usize,
    width: Option<usize>,
) -> String {
    let columns = columns(grouping, common, groups.seconds > 0.0);
    let context = Context { seconds: groups.seconds, guests };
    let mut table = Table::new(columns.iter().map(|column| column.column.clone()));
    for entry in groups.entries.iter().take(limit) {
        table.row(columns.iter().map(|column| (column.value)(entry, context)));
    }
    table.render(width, Style::stdout())
}

/// The number of entries beyond `limit`, as text; empty if there are none.
pub fn omitted(groups: &Groups, limit: usize) -> String {
    match groups.entries.len().saturating_sub(limit) {
        0 => String::new(),
        more => format!("and {more} more"),
    }
}

/// A table of the kinds, with their shares in all bytes.
pub fn shares(kinds: &Groups, width: Option<usize>) -> String {
    let sum = |bytes: fn(&UsageEntry) -> u64| kinds.entries.iter().map(bytes).sum::<u64>();
    let (read, written) =
        (sum(|entry| entry.counts.read.bytes), sum(|entry| entry.counts.write.bytes));
    let share = |part: u64, all: u64| match part as f64 / all.max(1) as f64 * 100.0 {
        _ if part == 0 => String::new(),
        percent if percent < 0.1 => "<0.1 %".into(),
        percent => format!("{percent:.1} %"),
    };
    let mut table = Table::new([
        TableColumn::text("KIND"),
        TableColumn::number("READS").importance(1),
        TableColumn::number("WRITES").importance(1),
        TableColumn::number("READ"),
        TableColumn::number(""),
        TableColumn::number("WRITTEN"),
        TableColumn::number(""),
    ]);
    let moves_data =
        |entry: &&UsageEntry| !(entry.counts.read.is_empty() && entry.counts.write.is_empty());
    for entry in kinds.entries.iter().filter(moves_data) {
        let counts = &entry.counts;
        table.row([
            entry.name.clone(),
            short_number(counts.read.requests as f64),
            short_number(counts.write.requests as f64),
            short_bytes(counts.read.bytes as f64),
            share(counts.read.bytes, read),
            short_bytes(counts.write.bytes as f64),
            share(counts.write.bytes, written),
        ]);
    }
    table.render(width, Style::stdout())
}

/// The facts of a line, each with a name and a value.
pub fn facts(entry: &UsageEntry, grouping: Grouping) -> Vec<(&'static str, String)> {
    let mut facts = vec![("machine", entry.machine.shares(str::to_owned))];
    facts.push(("disk", entry.disk.shares(str::to_owned)));
    if let Some(file) = &entry.file {
        let system = [file.file_system.as_str(), entry.device.only().unwrap_or_default()];
        facts.push(("file system", system.join(" on ").trim_end_matches(" on ").to_owned()));
        if file.inode != 0 {
            facts.push(("inode", format!("{}, owner {}", file.inode, file.owner)));
        }
        if file.size_bytes != 0 {
            facts.push(("size", Bytes(file.size_bytes).to_string()));
        }
    }
    facts.push(("container", entry.container.shares(container_name)));
    facts.push(("process", entry.process.shares(str::to_owned)));
    facts.push(("kind", entry.kind.shares(str::to_owned)));
    if grouping != Grouping::File {
        facts.push(("hottest file", entry.hottest.clone().unwrap_or_default()));
    }
    facts.retain(|fact| !fact.1.is_empty());
    facts
}

/// The details of a line on one line: `/srv/a · /web · 12 MiB`.
pub fn detail(entry: &UsageEntry, grouping: Grouping, guests: &[GuestInfo]) -> String {
    let mut parts = vec![match (&entry.key.container, grouping) {
        // The full name: the line itself shortens long numbers.
        (Some(container), Grouping::Container) if container.starts_with('/') => clean(container),
        _ => entry.name.clone(),
    }];
    if grouping == Grouping::Vm {
        if let Some(guest) = insight::guest_of(guests, &entry.name) {
            parts.push(insight::long(&guest.insight));
            parts.push(insight::counters(guest));
        }
    } else {
        parts.push(entry.container.text(container_name));
        parts.push(entry.process.text(str::to_owned));
        parts.push(entry.device.text(clean));
        if let Some(file) = entry.file.as_ref().filter(|file| file.size_bytes != 0) {
            parts.push(Bytes(file.size_bytes).to_string());
        }
        parts.extend(entry.hottest.clone().filter(|_| grouping != Grouping::File));
    }
    parts.retain(|part| !part.is_empty());
    parts.dedup();
    parts.join(" · ")
}

#[cfg(test)]
mod tests {
    use unicode_width::UnicodeWidthStr;

    use super::{super::tests::usage, *};
    use crate::usage::Accounts;

    fn groups(grouping: Grouping, seconds: f64) -> Groups {
        let mut usage = usage();
        usage.disks[0].rows[0].path = "/srv/日本語/e\u{301}te\u{301}\u{202e}.html".into();
        usage.disks[0].rows[1].path = format!("/srv/{}/index.html", "a-long-name/".repeat(30));
        usage.disks[0].rows[1].cgroup = format!("/docker/{}", "0123456789abcdef".repeat(4));
        let accounts = Accounts { seconds, ..Accounts::all(&usage) };
        let mut groups = Groups::of(&accounts, grouping, &Scope::default());
        groups.sort(UsageOrder::Requests);
        groups
    }

    #[test]
    fn a_table_fits_with_any_file_names() {
        for grouping in Grouping::ALL {
            for width in [40, 60, 80, 100, 160] {
                let text = table(
                    &groups(grouping, 2.0),
                    grouping,
                    &Scope::default(),
                    &[],
                    10,
                    Some(width),
                );
                assert!(text.lines().all(|line| line.width() <= width), "{width}\n{text}");
                assert!(text.contains("WRITE/S") || width < 60, "{width}\n{text}");
                assert!(!text.contains('\u{202e}'));
            }
        }
        let text = table(
            &groups(Grouping::File, 2.0),
            Grouping::File,
            &Scope::default(),
            &[],
            10,
            Some(80),
        );
        assert!(text.contains("…") && text.contains("/index.html"), "{text}");
        assert!(text.contains("CONTAINER") && text.contains("/database"), "{text}");
    }

    #[test]
    fn sums_are_reported_without_an_interval() {
        let all = groups(Grouping::File, 0.0);
        let text = table(&all, Grouping::File, &Scope::default(), &[], 3, None);
        assert!(text.contains("WRITES") && text.contains("/srv/table.dat"), "{text}");
        assert_eq!(text.lines().count(), 4, "{text}");
        assert_eq!(omitted(&all, 3), "and 2 more");
        let text = shares(&groups(Grouping::Kind, 0.0), None);
        assert!(text.contains("92.8 %") && text.contains("unknown"), "{text}");
    }
}
