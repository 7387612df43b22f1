//! `fathom explain-io`: lists slow requests, and shows everything known about one.
use clap::Args;
use fathom_control::{Bytes, DiskSlow, FactsStatus, SlowRequest};
use serde::Serialize;

use super::{group::container_name, words};
use crate::{
    connection::ControlOptions,
    failure::{CommandResult, Failure},
    output::{
        self, Format, latency,
        sheet::{Sheet, wrap},
        style::Style,
        table::{Table, TableColumn},
        text::clean,
        time::clock,
    },
};

/// The most slow requests that the daemon keeps of a disk.
const REQUESTS_MAX: usize = 128;
/// The most overlapping requests listed.
const OVERLAPPING_MAX: usize = 8;

/// Options of `fathom explain-io`.
#[derive(Debug, Args)]
#[command(after_help = "\
The daemon keeps the slowest requests of the last minute or two. Without an ID they are listed, the
slowest first. With an ID, everything known about that request is shown: its subject, its container
and process, where its time was spent, and which other slow requests were in flight at that time.

Examples:
  fathom explain-io root                 the slowest requests
  fathom explain-io root 17592186044417   one of them
  fathom explain-io root slowest         the slowest of them
  fathom explain-io root --operation read -n 5
  fathom explain-io root --json | jq '.requests[0].facts.path'")]
pub struct ExplainOptions {
    /// The disk's name
    #[arg(value_name = "DISK")]
    disk: String,
    /// The request's number, or `slowest`
    #[arg(value_name = "ID")]
    request: Option<String>,
    /// List only requests of this operation: read, write, flush, discard, write-zeroes
    #[arg(long, value_name = "OPERATION", conflicts_with = "request")]
    operation: Option<String>,
    /// The most requests to list
    #[arg(long, short = 'n', value_name = "N", default_value_t = 16)]
    limit: usize,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// The output of `--json` for one request.
#[derive(Serialize)]
struct Explanation<'a> {
    /// The description.
    text: String,
    #[serde(flatten)]
    request: &'a SlowRequest,
    /// The numbers of the slow requests that were in flight at that time.
    beside: Vec<u64>,
}

/// Carries out the command.
pub fn run(options: &ExplainOptions) -> CommandResult {
    let mut report = options.control.client().slow(Some(&options.disk), REQUESTS_MAX)?;
    let Some(disk) = report.disks.iter_mut().find(|disk| disk.name == options.disk) else {
        return Err(Failure::new(format!("the daemon serves no disk called {}", options.disk))
            .advise("`fathom disk list` shows its disks"));
    };
    let Some(wanted) = &options.request else {
        let is_listed = |request: &SlowRequest| {
            options.operation.as_ref().is_none_or(|operation| request.operation == *operation)
        };
        let all = disk.requests.len();
        disk.requests.retain(is_listed);
        if disk.requests.is_empty() && all > 0 && !options.format.json {
            let operation = options.operation.as_deref().unwrap_or_default();
            return output::text_line(&format!(
                "None of the {all} slowest requests of {} is a {operation}.",
                disk.name
            ));
        }
        disk.requests.truncate(options.limit);
        return if options.format.json { output::json(disk) } else { list(disk) };
    };
    let request = find(disk, wanted)?;
    let others = overlapping(disk, request);
    if options.format.json {
        return output::json(&Explanation {
            text: words::sentence(request),
            request,
            beside: others.iter().map(|other| other.id).collect(),
        });
    }
    let width = output::width();
    paragraph(&words::sentence(request), width)?;
    output::text_line("")?;
    output::text_line(&sheet(request, report.time_ns).render(width, Style::stdout()))?;
    if others.is_empty() {
        return output::text_line("\nNo other slow request was in flight at that time.");
    }
    output::text_line("\nOther slow requests in flight at that time:")?;
    let listed = &others[..others.len().min(OVERLAPPING_MAX)];
    output::text_line(&table(listed).render(width, Style::stdout()))?;
    match others.len().saturating_sub(OVERLAPPING_MAX) {
        0 => Ok(()),
        more => output::text_line(&format!("and {more} more")),
    }
}

fn find<'a>(disk: &'a DiskSlow, wanted: &str) -> CommandResult<&'a SlowRequest> {
    if disk.requests.is_empty() {
        return Err(Failure::new(nothing(disk)));
    }
    if wanted == "slowest" {
        return Ok(&disk.requests[0]);
    }
    let id: u64 = wanted
        .parse()
        .map_err(|_| Failure::usage(format!("{wanted} is neither a number nor `slowest`")))?;
    disk.requests.iter().find(|request| request.id == id).ok_or_else(|| {
        Failure::new(format!("slow request {wanted} of {} is not known (any more)", disk.name))
            .advise(format!("`fathom explain-io {}` lists the known ones", disk.name))
    })
}

fn nothing(disk: &DiskSlow) -> String {
    format!("No request of {} completed in the last minute or two.", disk.name)
}

/// The slow requests whose time overlaps with that of `request`, the slowest first.
fn overlapping<'a>(disk: &'a DiskSlow, request: &SlowRequest) -> Vec<&'a SlowRequest> {
    let end = |request: &SlowRequest| request.start_ns.saturating_add(request.latency_ns);
    disk.requests
        .iter()
        .filter(|other| other.id != request.id)
        .filter(|other| other.start_ns < end(request) && end(other) > request.start_ns)
        .collect()
}

fn list(disk: &DiskSlow) -> CommandResult {
    let Some(slowest) = disk.requests.first() else {
        return output::text_line(&nothing(disk));
    };
    let width = output::width();
    let requests: Vec<&SlowRequest> = disk.requests.iter().collect();
    output::text_line(&table(&requests).render(width, Style::stdout()))?;
    output::text_line("")?;
    paragraph(&format!("The slowest: {}", words::sentence(slowest)), width)?;
    output::text_line(&format!("More of one: fathom explain-io {} {}", disk.name, slowest.id))
}

fn paragraph(text: &str, width: Option<usize>) -> CommandResult {
    output::text_line(&wrap(text, width.unwrap_or(usize::MAX)).join("\n"))
}

fn table(requests: &[&SlowRequest]) -> Table {
    let mut table = Table::new([
        TableColumn::number("LATENCY"),
        TableColumn::text("TIME").importance(2),
        TableColumn::text("OPERATION"),
        TableColumn::number("SIZE").importance(4),
        TableColumn::text("WHAT").flexible_path(16),
        TableColumn::text("CONTAINER").flexible().importance(5),
        TableColumn::text("PROCESS").flexible().optional().importance(1),
        TableColumn::text("CACHE").optional().importance(0),
        TableColumn::number("AHEAD").importance(0),
        TableColumn::text("FAILED").flexible().optional().importance(3),
        TableColumn::number("ID"),
    ]);
    for request in requests {
        let facts = &request.facts;
        let container = match facts.cgroup.as_str() {
            "" => String::new(),
            cgroup => container_name(cgroup),
        };
        let process = match facts.process_id {
            0 => String::new(),
            id => super::describe::process(&facts.process, id),
        };
        table.row([
            latency(request.latency_ns),
            precise(request.unix_time_ns),
            request.operation.clone(),
            if request.length == 0 { String::new() } else { Bytes(request.length).to_string() },
            what(request),
            container,
            process,
            request.cache_hit.clone(),
            request.ahead.to_string(),
            request.error.clone(),
            request.id.to_string(),
        ]);
    }
    table
}

/// The subject of a request, in short.
fn what(request: &SlowRequest) -> String {
    if !matches!(request.operation.as_str(), "read" | "write") {
        return String::new();
    }
    let text = super::describe::facts(&request.facts);
    match request.parts.len() as u64 + request.parts_left_out {
        0 | 1 => text,
        parts => format!("{text} +{}", parts - 1),
    }
}

/// The time of day, to the millisecond.
fn precise(unix_time_ns: u64) -> String {
    format!("{}.{:03}", clock(unix_time_ns), unix_time_ns / 1_000_000 % 1000)
}

fn sheet(request: &SlowRequest, now_ns: u64) -> Sheet {
    let mut sheet = Sheet::default();
    sheet.fact("request", format!("{}, through queue {}", request.id, request.queue));
    let ago = now_ns.saturating_sub(request.start_ns) / 1_000_000_000;
    sheet.fact("started at", format!("{}, {ago} s ago", precise(request.unix_time_ns)));
    if request.length > 0 {
        let range = format!(
            "{} ({} bytes) from byte {}, sector {}",
            Bytes(request.length),
            request.length,
            request.offset,
            request.offset / 512
        );
        sheet.fact("range", range);
    }
    sheet.fact("took", times(request));
    let cache = match request.cache_hit.as_str() {
        "hit" => "had all of the data",
        "part" => "had a part of the data",
        "miss" => "had none of the data",
        _ => "",
    };
    sheet.fact_if_any("cache", cache);
    sheet.fact("queued ahead", format!("{} in its queue when it started", request.ahead));
    sheet.fact_if_any("failed", request.error.clone());
    // The flag of a flush needs no mention.
    let is_shown = |name: &&String| **name != request.operation;
    let flags: Vec<String> =
        request.flags.iter().filter(is_shown).map(|name| words::flag(name)).collect();
    sheet.fact_if_any("Linux flags", flags.join(", "));
    sheet.fact_if_any("I/O priority", words::priority(request.io_priority));
    if let Some(class) = request.class {
        sheet.fact("I/O class", class.to_string());
    }
    if request.length > 0 {
        add_facts(&mut sheet, &request.facts);
    }
    for part in &request.parts {
        let mut text = words::object(&part.facts);
        if !part.facts.cgroup.is_empty() && part.facts.cgroup != request.facts.cgroup {
            text += &format!(", for {}", container_name(&part.facts.cgroup));
        }
        sheet.fact(format!("part at {}", part.offset), format!("{}: {text}", Bytes(part.length)));
    }
    if request.parts_left_out > 0 {
        sheet.fact("omitted parts", request.parts_left_out.to_string());
    }
    sheet
}

/// How long the request took, and where.
fn times(request: &SlowRequest) -> String {
    let held = (request.held_ns > 0).then_some(request.held_ns);
    let held_back = format!("held back by the layer `{}`", request.held_by);
    let down = request.layers_down_ns.map(|down| down.saturating_sub(request.held_ns));
    let places = [
        ("in layers on the way down", down),
        (&held_back, held),
        ("in the back end", request.backend_ns),
        ("on the way back", request.layers_up_ns),
    ];
    let known: Vec<String> = places
        .into_iter()
        .filter_map(|(place, time)| Some((place, time?)))
        .map(|(place, time)| match time {
            0 => format!("none {place}"),
            time => format!("{} {place}", latency(time)),
        })
        .collect();
    match &known[..] {
        [] => format!("{}; completed by a layer", latency(request.latency_ns)),
        known => format!("{}: {}", latency(request.latency_ns), known.join(", ")),
    }
}

fn add_facts(sheet: &mut Sheet, facts: &FactsStatus) {
    let kind = if facts.kind.is_empty() { "unknown" } else { &facts.kind };
    sheet.fact("kind", kind.to_owned());
    sheet.fact_if_any("file", clean(&facts.path));
    if facts.inode != 0 {
        let size = Bytes(facts.file_size_bytes);
        sheet.fact("inode", format!("{} of {size}, owner {}", facts.inode, facts.owner));
    }
    let system = match (facts.file_system.as_str(), facts.device.as_str()) {
        (system, "") => system.to_owned(),
        ("", device) => device.to_owned(),
        (system, device) => format!("{system} on {device}"),
    };
    sheet.fact_if_any("file system", clean(&system));
    sheet.fact_if_any("container", clean(&facts.cgroup));
    if facts.process_id != 0 {
        let mut process = super::describe::process(&facts.process, facts.process_id);
        if !facts.process_role.is_empty() {
            process += &format!(", its {}", clean(&facts.process_role));
        }
        if facts.process_start_ns != 0 {
            let seconds = facts.process_start_ns as f64 / 1e9;
            process += &format!(", started {seconds:.2} s after the guest");
        }
        sheet.fact("process", process);
    }
    sheet.fact_if_any("expected life", words::lifetime(facts.write_hint));
    sheet.fact_if_any("known from", words::source(facts));
}

#[cfg(test)]
mod tests {
    use fathom_control::PartStatus;

    use super::{super::words::tests::request, *};

    #[test]
    fn a_sheet_shows_everything() {
        let mut request = SlowRequest { cache_hit: "part".into(), ..request() };
        let facts = FactsStatus {
            kind: "data".into(),
            path: "/srv/a\u{1b}[2J".into(),
            inode: 7,
            cgroup: "/web".into(),
            ..FactsStatus::default()
        };
        request.parts = vec![
            PartStatus { offset: 0, length: 40_960, facts: request.facts.clone() },
            PartStatus { offset: 40_960, length: 4096, facts },
        ];
        let text = sheet(&request, 13_000_000_000).render(None, Style::PLAIN);
        for part in [
            "12.3 ms: 1.0 µs in layers on the way down, 12.0 ms in the back end, 1.0 µs on the",
            "8 s ago",
            "had a part of the data",
            "44 KiB (45056 bytes) from byte 1048576, sector 2048",
            "meta (a file system's structures), sync (a process waits for it)",
            "ext4 on vda",
            "sure: structures that check each other agree",
            "part at 40960",
            "4 KiB: /srv/a\u{fffd}[2J, for /web",
        ] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        let text = table(&[&request]).render(Some(80), Style::PLAIN);
        assert!(text.contains("journal of ext4 on vda +1"), "{text}");
    }

    #[test]
    fn requests_that_overlap_are_found() {
        let at = |id, start_ns, latency_ns| SlowRequest { id, start_ns, latency_ns, ..request() };
        let requests = vec![at(1, 100, 50), at(2, 140, 20), at(3, 150, 9), at(4, 60, 41)];
        let disk = DiskSlow { name: "root".into(), requests, ..DiskSlow::default() };
        let ids: Vec<u64> =
            overlapping(&disk, &disk.requests[0]).iter().map(|request| request.id).collect();
        assert_eq!(ids, [2, 4]);
        assert_eq!(find(&disk, "slowest").expect("it is there").id, 1);
        assert_eq!(find(&disk, "3").expect("it is there").id, 3);
        assert!(find(&disk, "9").is_err() && find(&disk, "it").is_err());
    }
}
