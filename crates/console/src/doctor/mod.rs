//! `fathom doctor`: checks which parts of Fathom work on this host, and why others do not.

mod guests;
mod host;
mod storage;

use std::path::PathBuf;

use clap::Args;
use fathom_control::{Bytes, ClientError, DiskList, DiskStatus, Problem, ProblemKind, count};
use fathom_failure::Failing as _;
use serde::Serialize;

use crate::{
    connection::ControlOptions,
    failure::{CommandResult, FAILED},
    output::{
        self, Format,
        sheet::wrap,
        style::{self, Style},
    },
};

/// Options of `fathom doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
A cross marks a failure that keeps Fathom from serving disks; an exclamation mark, a limitation or
an optional part that is missing. KVM is tested by running a small guest, which takes up to four
seconds, once per boot of the host.

Examples:
  fathom doctor
  fathom doctor /var/lib/images      also check a directory for images
  fathom doctor --json

Exit status: 0 no failure, 1 a failure was found, 2 invalid command line.")]
pub struct DoctorOptions {
    /// Images, or directories for images, to check [default: those of the running daemon]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// How well something works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckOutcome {
    /// It works.
    Ok,
    /// It works with a limitation, or is optional and absent.
    Warn,
    /// It does not work.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The subject of the check.
    pub subject: String,
    /// How well it works.
    pub state: CheckOutcome,
    /// The result of the check.
    #[serde(rename = "finding")]
    pub text: String,
    /// The remedy; empty if there is none.
    pub remedy: String,
}

impl Finding {
    /// It works.
    pub fn ok(subject: impl Into<String>, finding: impl Into<String>) -> Self {
        let (subject, text) = (subject.into(), finding.into());
        Self { subject, state: CheckOutcome::Ok, text, remedy: String::new() }
    }

    /// It works with a limitation, or is optional and absent.
    pub fn warn(
        subject: impl Into<String>,
        finding: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { state: CheckOutcome::Warn, remedy: remedy.into(), ..Self::ok(subject, finding) }
    }

    /// It does not work.
    pub fn fail(
        subject: impl Into<String>,
        finding: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { state: CheckOutcome::Fail, remedy: remedy.into(), ..Self::ok(subject, finding) }
    }
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    failed: usize,
    warnings: usize,
    findings: &'a [Finding],
}

/// Carries out the command; the result is its exit status.
pub fn run(options: &DoctorOptions) -> CommandResult<u8> {
    let mut findings = host::findings();
    let (daemon, disks) = daemon(&options.control);
    findings.extend(daemon);
    findings.extend(disks.iter().flat_map(disk));
    findings.extend(guests::findings(&options.control, &disks));
    findings.extend(guests::pagers(&options.control));
    let mut paths = options.paths.clone();
    if paths.is_empty() {
        let of_disk = |disk: &DiskStatus| disk.backend.image.clone().or(disk.backend.store.clone());
        for path in disks.iter().filter_map(of_disk).map(PathBuf::from) {
            // Disks in a pool share its file.
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
    }
    if paths.is_empty() {
        paths.push(".".into());
    }
    for path in &paths {
        findings.extend(storage::findings(path));
    }
    let number = |state| findings.iter().filter(|finding| finding.state == state).count();
    let (failed, warnings) = (number(CheckOutcome::Fail), number(CheckOutcome::Warn));
    if options.format.json {
        output::json(&Report { failed, warnings, findings: &findings })?;
    } else {
        output::text_line(&text(&findings, output::width(), Style::stdout()))?;
        let verdict = match (failed, warnings) {
            (0, 0) => "Everything works.".to_owned(),
            (0, _) => format!("Fathom works here; {} could be better.", count(warnings, "thing")),
            (1, _) => format!("1 thing does not work, {warnings} could be better."),
            _ => format!("{failed} things do not work, {warnings} could be better."),
        };
        output::text_line(&format!("\n{verdict}"))?;
    }
    Ok(if failed == 0 { 0 } else { FAILED })
}

fn text(findings: &[Finding], width: Option<usize>, style: Style) -> String {
    let subjects = findings.iter().map(|finding| finding.subject.chars().count());
    let indent = subjects.max().unwrap_or(0).min(24) + 4;
    let room = width.unwrap_or(usize::MAX).saturating_sub(indent).max(20);
    let mut lines = Vec::new();
    for finding in findings {
        let mark = match finding.state {
            CheckOutcome::Ok => style.paint(style::GOOD, "✓"),
            CheckOutcome::Warn => style.paint(style::WARNING, "!"),
            CheckOutcome::Fail => style.paint(style::BAD, "✗"),
        };
        let label = format!("{mark} {:<1$}", finding.subject, indent - 2);
        let mut first = true;
        for line in wrap(&finding.text, room) {
            let start = if first { label.clone() } else { " ".repeat(indent) };
            // A long subject has a line of its own.
            if first && finding.subject.chars().count() > indent - 4 {
                lines.push(label.clone());
                lines.push(" ".repeat(indent) + &line);
            } else {
                lines.push(start + &line);
            }
            first = false;
        }
        for (index, line) in wrap(&finding.remedy, room - 2).iter().enumerate() {
            if !line.is_empty() {
                let arrow = if index == 0 { "→" } else { " " };
                lines.push(format!(
                    "{}{} {line}",
                    " ".repeat(indent),
                    style.paint(style::DIM, arrow)
                ));
            }
        }
    }
    lines.join("\n")
}

/// Checks the daemon. Returns the findings, and the daemon's disks.
fn daemon(control: &ControlOptions) -> (Vec<Finding>, Vec<DiskStatus>) {
    let client = control.client();
    let socket = client.socket().display().to_string();
    let status = client.daemon().and_then(|daemon| client.disks().map(|list| (daemon, list)));
    match status {
        Ok((daemon, DiskList { disks, unserved })) => {
            let served = match unserved.len() {
                0 => count(disks.len(), "disk"),
                others => format!("{} of {}", disks.len(), count(disks.len() + others, "disk")),
            };
            let text = format!(
                "version {} serves {served}, process {}, at {socket}",
                daemon.version, daemon.process_id
            );
            let mut findings = vec![Finding::ok("daemon", text)];
            findings.extend(daemon.problems.iter().map(|problem| match &problem.disk {
                Some(disk) => finding(&format!("disk {disk}"), problem),
                None => finding("daemon", problem),
            }));
            let is_new = |name: &String| {
                !daemon.problems.iter().any(|problem| problem.disk.as_ref() == Some(name))
            };
            findings.extend(unserved.iter().filter(|disk| is_new(&disk.name)).map(|disk| {
                let remedy = "run this command again in a moment";
                Finding::warn(format!("disk {}", disk.name), "is being opened", remedy)
            }));
            (findings, disks)
        }
        Err(error @ ClientError::Unreachable { .. }) if !control.is_named() => {
            let text = format!("none answers at {socket}");
            (vec![Finding::warn("daemon", text, error.remedy())], Vec::new())
        }
        Err(error) => {
            (vec![Finding::fail("daemon", error.to_string(), error.remedy())], Vec::new())
        }
    }
}

/// A finding for each problem of a disk, or one finding for a disk without problems.
fn disk(status: &DiskStatus) -> Vec<Finding> {
    let subject = format!("disk {}", status.name);
    if status.problems.is_empty() {
        return vec![Finding::ok(subject, format!("{}, served", Bytes(status.capacity_bytes)))];
    }
    status.problems.iter().map(|problem| finding(&subject, problem)).collect()
}

fn finding(subject: &str, problem: &Problem) -> Finding {
    let (message, remedy) = (problem.message.clone(), problem.remedy.clone());
    match problem.kind {
        // The disks serve their guest as before.
        ProblemKind::InterceptionPaused | ProblemKind::PagerSilent | ProblemKind::PagerLimit => {
            Finding::warn(subject, message, remedy)
        }
        _ => Finding::fail(subject, message, remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_wrap_under_their_own_column() {
        let findings = [
            Finding::ok("kernel", "6.18"),
            Finding::warn("KVM", "guests do not run under it at all", "run them emulated, slowly"),
        ];
        let text = text(&findings, Some(34), Style::PLAIN);
        assert_eq!(
            text,
            "✓ kernel  6.18\n\
             ! KVM     guests do not run under\n          it at all\n          \
             → run them emulated,\n            slowly"
        );
    }
}
