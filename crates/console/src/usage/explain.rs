//! `fathom explain-io`: slow requests, and all that is known of one.
use clap::Args;
use fathom_control::{Bytes, DiskSlow, FactsStatus, SlowRequest};

use super::describe;
use crate::{
    connection::ControlOptions,
    failure::{Failure, Outcome},
    output::{
        self, Format, latency,
        sheet::Sheet,
        style::Style,
        table::{Column, Table},
    },
    top::clock,
};

/// Options of `fathom explain-io`.
#[derive(Debug, Args)]
#[command(after_help = "\
The daemon keeps the slowest requests of the last minute or two. Without an ID they are listed, the
slowest first; with one, everything that is known of that request is told.

Examples:
  fathom explain-io root                 the slowest requests
  fathom explain-io root 17592186044417   one of them
  fathom explain-io root slowest         the slowest of them")]
pub struct ExplainOptions {
    /// The disk's name
    #[arg(value_name = "DISK")]
    disk: String,
    /// The request's number, or `slowest`
    #[arg(value_name = "ID")]
    request: Option<String>,
    /// How many to list
    #[arg(long, short = 'n', value_name = "N", default_value_t = 16)]
    limit: usize,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out the command.
pub fn run(options: &ExplainOptions) -> Outcome {
    let count = if options.request.is_some() { 64 } else { options.limit };
    let report = options.control.client().slow(Some(&options.disk), count)?;
    let Some(disk) = report.disks.iter().find(|disk| disk.name == options.disk) else {
        return Err(Failure::new(format!("the daemon serves no disk called {}", options.disk))
            .advise("`fathom disk list` shows those that it serves"));
    };
    let Some(wanted) = &options.request else {
        return if options.format.json { output::json(disk) } else { list(disk) };
    };
    let found = if wanted == "slowest" {
        disk.requests.first()
    } else {
        let id: u64 = wanted
            .parse()
            .map_err(|_| Failure::usage(format!("{wanted} is neither a number nor `slowest`")))?;
        disk.requests.iter().find(|request| request.id == id)
    };
    let Some(request) = found else {
        return Err(Failure::new(format!("no slow request {wanted} of {} is known", disk.name))
            .advise(format!("`fathom explain-io {}` lists those that are", disk.name)));
    };
    if options.format.json {
        return output::json(request);
    }
    output::text_line(&sentence(request))?;
    output::text_line("")?;
    output::text_line(&sheet(request).render(output::width(), Style::stdout()))
}

fn list(disk: &DiskSlow) -> Outcome {
    if disk.requests.is_empty() {
        return output::text_line(&format!("No request of {} was slow lately.", disk.name));
    }
    let mut table = Table::new([
        Column::number("ID"),
        Column::text("TIME").importance(2),
        Column::number("LATENCY"),
        Column::text("OPERATION"),
        Column::number("SIZE").importance(3),
        Column::text("KIND").importance(1),
        Column::text("CONTAINER").flexible().importance(4),
        Column::text("WHAT").flexible(),
    ]);
    for request in &disk.requests {
        table.row([
            request.id.to_string(),
            clock(request.unix_time_ns),
            latency(request.latency_ns),
            request.operation.clone(),
            if request.length == 0 { String::new() } else { Bytes(request.length).to_string() },
            request.facts.kind.clone(),
            request.facts.cgroup.clone(),
            what(request),
        ]);
    }
    output::text_line(&table.render(output::width(), Style::stdout()))
}

/// What most of a request is about, and that there is more.
fn what(request: &SlowRequest) -> String {
    let text = describe::facts(&request.facts);
    match request.parts.len() as u64 + request.parts_left_out {
        0 | 1 => text,
        parts => format!("{text} (and {} more parts)", parts - 1),
    }
}

/// One sentence for an operator.
fn sentence(request: &SlowRequest) -> String {
    let size =
        if request.length == 0 { String::new() } else { format!(" of {}", Bytes(request.length)) };
    let mut text = format!("A {}{size}", request.operation);
    let moves_data = request.operation == "read" || request.operation == "write";
    if moves_data {
        let towards = if request.operation == "read" { "from" } else { "to" };
        text += &format!(" {towards} {}", what(request));
    }
    if !request.facts.process.is_empty() {
        text += &format!(", by {} ({})", request.facts.process, request.facts.process_id);
    }
    if !request.facts.cgroup.is_empty() {
        text += &format!(", charged to {}", request.facts.cgroup);
    }
    let comma = if text.contains(',') { "," } else { "" };
    text += &format!("{comma} took {}", latency(request.latency_ns));
    match (request.backend_ns, request.layers_down_ns, request.layers_up_ns) {
        (Some(backend), Some(down), Some(up)) if down + up > backend => {
            text += ", most of it in Fathom's layers";
        }
        (Some(_), ..) if request.ahead > 0 => {
            text += &format!(", in the back end, behind {} others", request.ahead);
        }
        (Some(_), ..) => text += ", in the back end",
        _ => {}
    }
    if !request.error.is_empty() {
        text += &format!(", and failed: {}", request.error);
    }
    text + "."
}

fn sheet(request: &SlowRequest) -> Sheet {
    let mut sheet = Sheet::default();
    sheet.fact("request", format!("{} through queue {}", request.id, request.queue));
    sheet.fact("came at", clock(request.unix_time_ns));
    if request.length > 0 {
        let range = format!("{} at byte {}", Bytes(request.length), request.offset);
        sheet.fact("range", range);
    }
    sheet.fact("took", latency(request.latency_ns));
    for (name, time) in [
        ("layers, down", request.layers_down_ns),
        ("back end", request.backend_ns),
        ("layers, up", request.layers_up_ns),
    ] {
        if let Some(time) = time {
            sheet.fact(format!("  {name}"), latency(time));
        }
    }
    sheet.fact("under way", format!("{} others when it came", request.ahead));
    sheet.fact_if_any("failed", request.error.clone());
    sheet.fact_if_any("marked by Linux", request.flags.join(", "));
    if let Some(class) = request.class {
        sheet.fact("I/O class", class.to_string());
    }
    if request.io_priority != 0 {
        sheet.fact("I/O priority", request.io_priority.to_string());
    }
    add_facts(&mut sheet, &request.facts);
    for part in &request.parts {
        let range = format!("part at {}", part.offset);
        let text = format!("{}: {}", Bytes(part.length), describe::facts(&part.facts));
        sheet.fact(range, text);
    }
    if request.parts_left_out > 0 {
        sheet.fact("and", format!("{} more parts", request.parts_left_out));
    }
    sheet
}

fn add_facts(sheet: &mut Sheet, facts: &FactsStatus) {
    sheet.fact("kind", facts.kind.clone());
    sheet.fact_if_any("file", facts.path.clone());
    if facts.inode != 0 {
        let size = Bytes(facts.file_size_bytes);
        sheet.fact("inode", format!("{} of {size}, owner {}", facts.inode, facts.owner));
    }
    let system = [facts.file_system.as_str(), facts.device.as_str()];
    sheet.fact_if_any("file system", system.join(" ").trim().to_owned());
    sheet.fact_if_any("container", facts.cgroup.clone());
    if !facts.process.is_empty() {
        sheet.fact("process", format!("{} ({})", facts.process, facts.process_id));
    }
    if facts.source != "none" && !facts.source.is_empty() {
        sheet.fact(
            "known from",
            format!("the guest kernel's {} ({})", facts.source, facts.confidence),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_in_one_sentence() {
        let request = SlowRequest {
            operation: "write".into(),
            length: 45_056,
            latency_ns: 12_300_000,
            backend_ns: Some(12_000_000),
            layers_down_ns: Some(1000),
            layers_up_ns: Some(1000),
            ahead: 3,
            facts: FactsStatus {
                kind: "journal".into(),
                file_system: "ext4".into(),
                device: "vda".into(),
                cgroup: "/".into(),
                ..FactsStatus::default()
            },
            ..SlowRequest::default()
        };
        assert_eq!(
            sentence(&request),
            "A write of 44 KiB to journal of ext4 on vda, charged to /, took 12.3 ms, in the back \
             end, behind 3 others."
        );
        let text = sheet(&request).render(None, Style::PLAIN);
        assert!(text.contains("back end") && text.contains("12.0 ms"), "{text}");
    }
}
