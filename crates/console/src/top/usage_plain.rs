//! Who causes the I/O, as tables or JSON.
use std::{
    thread,
    time::{Duration, Instant},
};

use fathom_control::{Client, ClientError, GuestInfo};

use super::{TopOptions, usage_json};
use crate::output::time::clock;
use crate::{
    failure::{CommandResult, Failure},
    output::{self, short_bytes, short_number},
    usage::{Accounts, Grouping, Groups, Scope, insight, omitted, table},
};

/// The most lines of an interval, by default.
const LINES_MAX: usize = 20;

/// Prints who causes the I/O, for each interval.
pub fn intervals(options: &TopOptions, client: &Client, grouping: Grouping) -> CommandResult {
    let pause = Duration::from_nanos(options.interval.0);
    let sample = || client.usage(options.disk.as_deref(), options.vm.as_deref());
    let mut before = sample()?;
    let mut next = Instant::now() + pause;
    let mut printed = 0;
    while options.count.is_none_or(|count| printed < count) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next = (next + pause).max(Instant::now());
        let after = sample().map_err(lost)?;
        let guests = client.guests().map_err(lost)?.guests;
        print(options, &Accounts::between(&before, &after), grouping, &guests)?;
        before = after;
        printed += 1;
    }
    Ok(())
}

fn lost(error: ClientError) -> Failure {
    match error {
        error @ ClientError::Refused(_) => error.into(),
        error => Failure::from(error).about("lost the daemon"),
    }
}

/// Prints who has caused the I/O since counting began.
pub fn since_start(options: &TopOptions, client: &Client, grouping: Grouping) -> CommandResult {
    let report = client.usage(options.disk.as_deref(), options.vm.as_deref())?;
    let guests = client.guests()?.guests;
    print(options, &Accounts::all(&report), grouping, &guests)
}

fn print(
    options: &TopOptions,
    accounts: &Accounts,
    grouping: Grouping,
    guests: &[GuestInfo],
) -> CommandResult {
    if options.format.json {
        let wanted = usage_json::Wanted {
            by: grouping,
            container: None,
            order: options.sort.of_accounts(),
            filter: &options.filter,
            limit: options.limit.unwrap_or(usize::MAX),
        };
        return output::text_line(&usage_json::text(accounts, &wanted, guests));
    }
    let mut groups = Groups::of(accounts, grouping, &Scope::default());
    groups.filter(&options.filter);
    groups.sort(options.sort.of_accounts());
    let shown = usage_json::shown(accounts, guests);
    let limit = options.limit.unwrap_or(LINES_MAX);
    let common = accounts.common();
    output::text_line(&text(&groups, grouping, &common, &shown, limit, output::width()))
}

/// A line with the totals, and a table.
fn text(
    groups: &Groups,
    grouping: Grouping,
    common: &Scope,
    guests: &[GuestInfo],
    limit: usize,
    width: Option<usize>,
) -> String {
    let mut lines = vec![format!("{}; {}", head(groups), insight::summary(guests))];
    if groups.entries.is_empty() {
        lines.push("No I/O, or no line matches the filter.".into());
    } else {
        lines.push(table(groups, grouping, common, guests, limit, width));
    }
    lines.push(omitted(groups, limit));
    if groups.seconds > 0.0 && lines.last().is_some_and(|line| !line.is_empty()) {
        // An empty line separates two intervals.
        lines.push(String::new());
    }
    lines.join("\n").trim_end_matches('\n').to_owned()
        + if groups.seconds > 0.0 { "\n" } else { "" }
}

fn head(groups: &Groups) -> String {
    let total = &groups.total;
    if groups.seconds <= 0.0 {
        return format!(
            "since counting began: {} reads ({}), {} writes ({})",
            short_number(total.read.requests as f64),
            short_bytes(total.read.bytes as f64),
            short_number(total.write.requests as f64),
            short_bytes(total.write.bytes as f64)
        );
    }
    let rate = |number: u64| number as f64 / groups.seconds;
    format!(
        "{}  {} reads/s ({}/s), {} writes/s ({}/s)",
        clock(groups.unix_time_ns),
        short_number(rate(total.read.requests)),
        short_bytes(rate(total.read.bytes)),
        short_number(rate(total.write.requests)),
        short_bytes(rate(total.write.bytes))
    )
}

#[cfg(test)]
mod tests {
    use super::super::usage_view::tests::samples;
    use super::*;
    use crate::usage::UsageOrder;

    #[test]
    fn an_interval_is_a_line_and_a_table() {
        let (before, after) = samples();
        let mut groups =
            Groups::of(&Accounts::between(&before, &after), Grouping::Container, &Scope::default());
        groups.sort(UsageOrder::Requests);
        let lines = text(&groups, Grouping::Container, &Scope::default(), &[], 3, None);
        let lines: Vec<&str> = lines.split('\n').collect();
        assert_eq!(
            lines[0],
            "00:00:01  0 reads/s (0/s), 94 writes/s (376K/s); no guest is connected"
        );
        assert!(lines[1].starts_with("CONTAINER"), "{lines:?}");
        assert!(
            lines[2].starts_with("/database") && lines[2].contains("/srv/table.dat"),
            "{lines:?}"
        );
        assert_eq!((lines[5], lines[6], lines.len()), ("and 2 more", "", 7));
        let all = Groups::of(&Accounts::all(&after), Grouping::Kind, &Scope::default());
        let text = text(&all, Grouping::Kind, &Scope::default(), &[], 10, Some(60));
        assert!(text.starts_with("since counting began: 0 reads (0), 97 writes (388K)"), "{text}");
        assert!(!text.ends_with('\n') && text.contains("metadata"), "{text}");
    }
}
