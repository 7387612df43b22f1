//! `fathom audit`: who has changed what over the control interface.

use std::io::{ErrorKind, Write};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use fathom_control::{AUDIT_ENTRIES_MAX, AuditEntry, AuditQuery, Nanoseconds};

use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure};
use crate::output::screen::safe;
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::text::clean;
use crate::output::time::day_and_time;
use crate::output::{self, Format};

/// The interval between looks for new entries.
const INTERVAL: Duration = Duration::from_secs(1);

/// Options of `fathom audit`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each line is a request that changes something, or was refused, and ended at that time. WHO is the user of the
process that sent it; `-` is the daemon itself or a signal. The daemon keeps the last 8 to 16 MiB of entries
over its restarts.

Examples:
  fathom audit                       the last 100 changes
  fathom audit --since 1d
  fathom audit --follow              also those to come, until Ctrl-C
  fathom audit --json | jq '.entries[] | select(.status != 200)'

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct AuditOptions {
    /// The most entries
    #[arg(long, value_name = "N", default_value_t = 100,
        value_parser = clap::value_parser!(u64).range(1..=AUDIT_ENTRIES_MAX))]
    count: u64,
    /// Only the entries of the last time: 10m, 1h, 7d
    #[arg(long, value_name = "TIME")]
    since: Option<Nanoseconds>,
    /// Wait for further entries. With --json, an object for each
    #[arg(short, long)]
    follow: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &AuditOptions) -> CommandResult {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let now = u64::try_from(now).unwrap_or(u64::MAX);
    let after = options.since.map(|since| now.saturating_sub(since.0));
    let client = options.control.client();
    let mut query = AuditQuery { count: options.count, after };
    let report = client.audit(query)?;
    if !options.follow && options.format.json {
        return output::json(&report);
    }
    let mut notes = Vec::new();
    if !report.problem.is_empty() {
        notes.push(format!("Changes are missing from now on: {}", clean(&report.problem)));
    }
    for (count, what) in
        [(report.lost, "could not be written"), (report.unreadable, "cannot be read")]
    {
        if count > 0 {
            notes.push(format!("{} {what}.", fathom_control::count(count, "line")));
        }
    }
    if !options.follow {
        if report.entries.is_empty() {
            notes.push("Nothing was changed.".into());
        } else {
            notes.insert(0, table(&report.entries).render(output::width(), Style::stdout()));
        }
        return output::text_line(&notes.join("\n"));
    }
    for text in &notes {
        note!("{text}");
    }
    let mut entries = report.entries;
    loop {
        for entry in &entries {
            query.after = query.after.max(Some(entry.unix_time_ns));
            if !write(entry, options.format.json)? {
                return Ok(());
            }
        }
        thread::sleep(INTERVAL);
        query.count = AUDIT_ENTRIES_MAX;
        entries = client.audit(query)?.entries;
    }
}

/// Prints an entry at once. Returns false if nobody reads any more.
fn write(entry: &AuditEntry, is_json: bool) -> Result<bool, Failure> {
    let text = if is_json {
        let text = serde_json::to_string(entry);
        text.map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?
    } else {
        safe(&line(entry)).into_owned()
    };
    let mut output = std::io::stdout().lock();
    match writeln!(output, "{text}").and_then(|()| output.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::new(format!("cannot write the result: {error}"))),
    }
}

fn table(entries: &[AuditEntry]) -> Table {
    let mut table = Table::new([
        TableColumn::text("WHEN"),
        TableColumn::text("WHO"),
        TableColumn::text("PROCESS").importance(1),
        TableColumn::text("REQUEST").flexible(),
        TableColumn::text("RESULT").flexible(),
        TableColumn::text("BODY").flexible().importance(0),
    ]);
    for entry in entries {
        table.row([
            day_and_time(entry.unix_time_ns),
            who(entry),
            process(entry),
            clean(&entry.request),
            result(entry),
            clean(&entry.body),
        ]);
    }
    table
}

fn line(entry: &AuditEntry) -> String {
    let (when, body) = (day_and_time(entry.unix_time_ns), clean(&entry.body));
    let parts = [when, who(entry), process(entry), clean(&entry.request), result(entry), body];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("  ")
}

fn who(entry: &AuditEntry) -> String {
    match (entry.user.as_str(), entry.user_id) {
        ("", Some(id)) => id.to_string(),
        ("", None) => "-".to_owned(),
        (name, _) => clean(name),
    }
}

fn process(entry: &AuditEntry) -> String {
    match (entry.command.as_str(), entry.process_id) {
        ("", Some(id)) => id.to_string(),
        (_, None) => String::new(),
        (command, Some(id)) => format!("{} ({id})", clean(command)),
    }
}

fn result(entry: &AuditEntry) -> String {
    match (entry.status, entry.error.as_str()) {
        (None, error) => clean(error),
        (Some(200..=299), _) => "ok".to_owned(),
        (Some(status), error) => format!("{status}: {}", clean(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_and_what_came_of_it_is_shown() {
        let entry = AuditEntry {
            unix_time_ns: 1_700_000_000_000_000_000,
            user_id: Some(1000),
            user: "ada\u{1b}[2J".into(),
            process_id: Some(7),
            command: "fathom".into(),
            request: "DELETE /v1/disks/a".into(),
            status: Some(409),
            error: "a VMM is connected".into(),
            ..AuditEntry::default()
        };
        let shown = line(&entry);
        assert!(!shown.contains('\u{1b}'), "{shown}");
        for part in ["ada", "fathom (7)", "DELETE /v1/disks/a", "409: a VMM is connected"] {
            assert!(shown.contains(part), "{shown}");
        }
        let unnamed = AuditEntry { user: String::new(), status: Some(200), ..entry };
        assert_eq!((who(&unnamed).as_str(), result(&unnamed).as_str()), ("1000", "ok"));
        let signal = AuditEntry { request: "SIGHUP".into(), ..AuditEntry::default() };
        assert_eq!(
            (who(&signal), process(&signal), result(&signal)),
            ("-".into(), String::new(), String::new())
        );
        let text = table(&[unnamed, signal]).render(Some(80), Style::PLAIN);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
}
