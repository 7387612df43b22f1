//! `fathom disk import`: whatever `qemu-img` reads, as a raw image.
use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use fathom_control::Bytes;
use serde::{Deserialize, Serialize};

use super::{
    ImportOptions, create::refuse_if_held, create::sync_directory, exact, image::file_system,
};
use crate::{
    failure::{Failure, Outcome},
    output::{self, progress::Progress},
};

/// What `qemu-img info` says of an image.
#[derive(Clone, Debug, Deserialize)]
pub struct QemuImage {
    /// The format's name.
    pub format: String,
    /// The size that guests see.
    #[serde(rename = "virtual-size")]
    pub virtual_size: u64,
    /// Room taken.
    #[serde(rename = "actual-size", default)]
    pub actual_size: u64,
}

#[derive(Serialize)]
struct Imported<'a> {
    source: &'a str,
    source_format: &'a str,
    target: &'a Path,
    size_bytes: u64,
    allocated_bytes: u64,
}

pub(super) fn run(options: &ImportOptions) -> Outcome {
    let target = &options.target;
    refuse_existing(options)?;
    let source = qemu_image_info(&options.source, options.source_format.as_deref())?;
    if let Some(below) = parent(target).and_then(file_system) {
        if below.free < source.actual_size {
            return Err(Failure::new(format!(
                "{} holds {} of data, but {} has {} free",
                options.source,
                Bytes(source.actual_size),
                below.mount_point.as_deref().unwrap_or(target).display(),
                Bytes(below.free)
            ))
            .advise("make room, or choose a target on another file system"));
        }
    }
    // The target has its name only when it is whole.
    let mut part = target.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let converted = convert(options, &source, &part)
        .and_then(|()| finish(&part, target).map_err(|error| Failure::io("write", target, &error)));
    if converted.is_err() {
        // It may never have been made.
        let _ = fs::remove_file(&part);
    }
    converted?;
    let metadata = fs::metadata(target).map_err(|error| Failure::io("read", target, &error))?;
    let allocated = std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
    if options.format.json {
        return output::json(&Imported {
            source: &options.source,
            source_format: &source.format,
            target,
            size_bytes: metadata.len(),
            allocated_bytes: allocated,
        });
    }
    output::text_line(&format!(
        "{}: {} from {} ({}), {} allocated",
        target.display(),
        exact(metadata.len()),
        options.source,
        source.format,
        Bytes(allocated)
    ))
}

fn refuse_existing(options: &ImportOptions) -> Outcome {
    let target = &options.target;
    match fs::symlink_metadata(target) {
        Err(_) => Ok(()),
        Ok(metadata) if !metadata.is_file() => {
            Err(Failure::new(format!("{} is no regular file", target.display()))
                .advise("import to a new path"))
        }
        Ok(_) if !options.force => Err(Failure::new(format!("{} exists", target.display()))
            .advise("choose another path, or replace it with --force: what it holds is lost")),
        Ok(_) => refuse_if_held(target),
    }
}

fn parent(path: &Path) -> Option<&Path> {
    path.parent().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p })
}

/// Sizes of an image of any format.
///
/// # Errors
/// When `qemu-img` is not there or cannot read the image.
pub fn qemu_image_info(source: &str, format: Option<&str>) -> Outcome<QemuImage> {
    let mut command = Command::new("qemu-img");
    command.args(["info", "--output=json"]);
    if let Some(format) = format {
        command.args(["-f", format]);
    }
    let output = command.arg("--").arg(source).output().map_err(|error| absent(&error))?;
    if !output.status.success() {
        return Err(refused(source, &output));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Failure::new(format!("qemu-img's answer about {source}: {error}")))
}

fn absent(error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::NotFound {
        Failure::new("qemu-img, which reads foreign image formats, is not installed").advise(
            "install it: apt install qemu-utils (Debian, Ubuntu), dnf install qemu-img (Fedora)",
        )
    } else {
        Failure::new(format!("qemu-img does not start: {error}"))
    }
}

fn refused(source: &str, output: &Output) -> Failure {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().next().unwrap_or("no reason given");
    let line = line.strip_prefix("qemu-img: ").unwrap_or(line);
    let failure = Failure::new(format!("qemu-img cannot read {source}: {line}"));
    if line.contains("lock") {
        failure.advise("the image is in use: stop the virtual machine first")
    } else if line.contains("Unknown driver") {
        failure.advise("`qemu-img --help` lists the formats it knows")
    } else {
        failure
    }
}

fn convert(options: &ImportOptions, source: &QemuImage, part: &Path) -> Outcome {
    let mut arguments: Vec<OsString> = ["convert", "-p", "-O", "raw"].map(Into::into).into();
    if let Some(format) = &options.source_format {
        arguments.extend([OsStr::new("-f"), OsStr::new(format)].map(Into::into));
    }
    arguments.push("--".into());
    arguments.push((&options.source).into());
    arguments.push(part.into());
    let mut child = Command::new("qemu-img")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| absent(&error))?;
    let label = format!("Importing {}", options.source);
    let mut progress = Progress::new(label, source.virtual_size).silent(options.format.json);
    let mut text = Vec::new();
    let mut buffer = [0; 256];
    if let Some(stdout) = &mut child.stdout {
        while let Ok(count @ 1..) = stdout.read(&mut buffer) {
            text.extend_from_slice(&buffer[..count]);
            if let Some(share) = parse_progress(&text) {
                progress.update((share * source.virtual_size as f64) as u64);
                // What follows the last report is yet to be completed.
                let keep = text.len().saturating_sub(32);
                text.drain(..keep);
            }
        }
    }
    drop(progress);
    let output = child
        .wait_with_output()
        .map_err(|error| Failure::new(format!("qemu-img was lost: {error}")))?;
    if !output.status.success() {
        return Err(refused(&options.source, &output));
    }
    Ok(())
}

/// The last complete progress report in what `qemu-img -p` printed so far, as a share of one:
/// `    (12.34/100%)` and a carriage return each.
pub fn parse_progress(text: &[u8]) -> Option<f64> {
    let text = String::from_utf8_lossy(text);
    let reports = text.split('(').filter_map(|report| report.split_once("/100%)"));
    let share: f64 = reports.filter_map(|(percent, _)| percent.trim().parse().ok()).next_back()?;
    Some((share / 100.0).clamp(0.0, 1.0))
}

/// Makes the data durable, then the name. Sizes are rounded up to whole sectors.
fn finish(part: &Path, target: &Path) -> io::Result<()> {
    let file = File::options().write(true).open(part)?;
    let length = file.metadata()?.len();
    if length % 512 != 0 {
        file.set_len(length.next_multiple_of(512))?;
    }
    file.sync_all()?;
    fs::rename(part, target)?;
    sync_directory(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_report_counts() {
        assert_eq!(parse_progress(b"    (0.00/100%)\r"), Some(0.0));
        assert_eq!(parse_progress(b"    (0.00/100%)\r    (12.50/100%)\r    (13.1"), Some(0.125));
        assert_eq!(parse_progress(b"    (100.00/100%)\r\n"), Some(1.0));
        assert_eq!(parse_progress(b"    (12.5"), None);
        assert_eq!(parse_progress(b"(x/100%) (-1/100%)"), Some(0.0));
        assert_eq!(parse_progress(b""), None);
    }
}
