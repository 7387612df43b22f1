//! What the host has swapped out of guests' memory, and the needless I/O.

use fathom_control::{Bytes, GuestPagerState, PageEstimate, PagerDisk, PagerGuest, PagerReport};

use super::{guest_name, summary};
use crate::connection::ControlOptions;
use crate::failure::CommandResult;
use crate::output;
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::text::clean;

/// Shows it of one guest or all.
pub fn run(control: &ControlOptions, guest: Option<&str>, json: bool) -> CommandResult {
    let report = control.client().pager(guest)?;
    if json {
        return output::json(&report);
    }
    if report.guests.is_empty() {
        return output::text_line("No guest runs on a vhost-user disk.");
    }
    output::text_line(&text(&report, output::width(), Style::stdout()))
}

fn text(report: &PagerReport, width: Option<usize>, style: Style) -> String {
    let mut parts = vec![swap_of_host(report), memory(report).render(width, style)];
    let disks: Vec<&PagerDisk> = report.guests.iter().flat_map(|guest| &guest.watched).collect();
    if !disks.is_empty() {
        parts.push(needless(&disks).render(width, style));
    }
    let pagers = report.guests.iter().filter_map(of_pager);
    let notes: Vec<String> = pagers.chain(report.guests.iter().filter_map(note)).collect();
    if !notes.is_empty() {
        parts.push(notes.join("\n"));
    }
    parts.join("\n\n")
}

fn swap_of_host(report: &PagerReport) -> String {
    match (report.host_swap_bytes, report.host_swap_used_bytes) {
        (0, _) => "The host has no swap space.".to_owned(),
        (total, used) => {
            format!("Swap space of the host: {} of {} used", Bytes(used), Bytes(total))
        }
    }
}

fn memory(report: &PagerReport) -> Table {
    let mut table = Table::new([
        TableColumn::text("GUEST").flexible(),
        TableColumn::text("DISKS").flexible().importance(1),
        TableColumn::number("MEMORY").importance(2),
        TableColumn::number("RESIDENT"),
        TableColumn::number("SWAPPED"),
        TableColumn::number("AWAY"),
        TableColumn::number("COUNTED IN").importance(0),
    ]);
    let bytes = |value: Option<u64>| value.map_or_else(|| "-".into(), |it| Bytes(it).to_string());
    for guest in &report.guests {
        let pager = guest.pager.as_ref().filter(|pager| !pager.has_detached());
        table.row([
            guest_name(guest),
            clean(&guest.disks.join(", ")),
            Bytes(guest.memory_bytes).to_string(),
            bytes(guest.resident_bytes),
            bytes(guest.swapped_bytes),
            bytes(pager.map(|pager| pager.away_bytes)),
            format!("{:.1} ms", guest.count_ns as f64 / 1e6),
        ]);
    }
    table
}

fn needless(disks: &[&PagerDisk]) -> Table {
    let mut table = Table::new([
        TableColumn::text("DISK").flexible(),
        TableColumn::number("STALE READS"),
        TableColumn::number("DOUBLE"),
        TableColumn::number("SILENT").importance(2),
        TableColumn::number("OF").importance(1),
        TableColumn::number("REREAD").importance(0),
    ]);
    for disk in disks {
        table.row([
            clean(&disk.disk),
            Bytes(disk.stale_read_bytes).to_string(),
            Bytes(disk.double_paging_bytes).to_string(),
            estimate(disk.silent_writes),
            estimate(disk.swapped_out),
            estimate(disk.rereads),
        ]);
    }
    table
}

/// An estimate with its standard error.
fn estimate(of: PageEstimate) -> String {
    match of.sampled_pages {
        0 => "0".to_owned(),
        pages => format!("{} ±{:.0}%", Bytes(of.bytes), 100.0 / (pages as f64).sqrt()),
    }
}

/// What the pager of a guest reports.
fn of_pager(guest: &PagerGuest) -> Option<String> {
    let pager = guest.pager.as_ref()?;
    let name = guest_name(guest);
    let silent = if pager.state == GuestPagerState::Silent {
        format!("; it has not reported for {} s", pager.age_ns / 1_000_000_000)
    } else {
        String::new()
    };
    if pager.has_detached() {
        return Some(format!("{name}: its pager has detached"));
    }
    Some(format!("{name}: its pager: {}{silent}", summary(pager)))
}

/// What is missing of a guest, and how to get it.
fn note(guest: &PagerGuest) -> Option<String> {
    if !guest.unknown.is_empty() {
        return Some(format!(
            "{}: what is swapped out is not known: {}",
            guest_name(guest),
            guest.unknown
        ));
    }
    let disk = guest.disks.first().filter(|_| guest.watched.is_empty())?;
    guest.swapped_bytes.filter(|bytes| *bytes > 0)?;
    Some(format!(
        "{}: `fathom disk layer {} swap-watch` counts the needless I/O",
        guest_name(guest),
        clean(disk)
    ))
}

#[cfg(test)]
mod tests {
    use fathom_control::GuestPager;

    use super::*;

    fn guest(vm: &str, swapped: Option<u64>) -> PagerGuest {
        PagerGuest {
            vm: vm.into(),
            disks: vec!["root\u{1b}[2J".into(), "data".into()],
            memory_bytes: 4 << 30,
            resident_bytes: swapped.map(|_| 1 << 30),
            swapped_bytes: swapped,
            ..PagerGuest::default()
        }
    }

    #[test]
    fn the_report_fits_a_terminal_and_says_what_is_not_known() {
        let mut watched = guest("", Some(3 << 20));
        let sample = |sampled_pages, bytes| PageEstimate { sampled_pages, bytes };
        watched.watched.push(PagerDisk {
            disk: "data".into(),
            stale_read_bytes: 5 << 20,
            double_paging_bytes: 7 << 20,
            silent_writes: sample(100, 11 << 20),
            swapped_out: sample(400, 13 << 20),
            ..PagerDisk::default()
        });
        let pager = |state, age_s: u64| GuestPager {
            state,
            age_ns: age_s * 1_000_000_000,
            limit_bytes: 1 << 30,
            resident_bytes: 1 << 30,
            away_bytes: 300 << 20,
            store_bytes: 110 << 20,
            ..GuestPager::default()
        };
        watched.pager = Some(pager(GuestPagerState::Attached, 1));
        let mut old = guest("old", None);
        old.unknown = "the host's kernel is older than Linux 6.5".into();
        let mut silent = guest("idle", Some(0));
        silent.pager = Some(pager(GuestPagerState::Silent, 45));
        let mut detached = guest("gone", Some(0));
        detached.pager = Some(pager(GuestPagerState::Detached, 99));
        let guests = vec![watched, old, guest("other", Some(4096)), silent, detached];
        let report = PagerReport {
            host_swap_bytes: 8 << 30,
            host_swap_used_bytes: 1 << 30,
            guests,
            ..PagerReport::default()
        };
        let text = text(&report, Some(80), Style::PLAIN);
        let tables = text.lines().take_while(|line| !line.contains(": its pager"));
        for line in tables {
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert_eq!(text.matches("300 MiB").count(), 4, "{text}");
        for part in [
            "data: its pager: attached, a limit of 1 GiB: 1 GiB in memory, 300 MiB away in 110 MiB\n",
            "idle: its pager: silent",
            "away in 110 MiB; it has not reported for 45 s\n",
            "gone: its pager has detached\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains('\u{1b}'), "{text}");
        for part in ["±10%", "±5%", "old: what is swapped out is not known", "other: `fathom disk"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("idle: `fathom"), "{text}");
        let row = text.lines().find(|line| line.starts_with("data")).unwrap();
        assert!(row.contains('5') && row.contains('7') && row.trim_end().ends_with('0'), "{text}");
        assert!(swap_of_host(&PagerReport::default()).contains("no swap space"));
    }
}
