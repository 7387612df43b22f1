//! `fathom disk import`: converts any image that `qemu-img` reads to a raw image.
use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::FileTypeExt,
    path::Path,
    process::{Command, Output, Stdio},
};

use fathom_control::Bytes;
use fathom_image::{ForeignFormat, ImageChange};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::{
    ImportOptions, claim::Claim, create::sync_directory, exact, image::file_system,
    interrupted::Interrupted, references, template,
};
use crate::{
    failure::{CommandResult, Failure},
    output::{self, progress::Progress},
    process::spawn_bound,
};

/// The properties that `qemu-img info` reports of an image.
#[derive(Clone, Debug, Deserialize)]
pub struct QemuImage {
    /// The format's name.
    pub format: String,
    /// The size that guests see.
    #[serde(rename = "virtual-size")]
    pub virtual_size: u64,
    /// Space allocated, in bytes.
    #[serde(rename = "actual-size", default)]
    pub actual_size: u64,
    /// The file with the rest of the content, if any.
    #[serde(rename = "backing-filename")]
    pub backing_file: Option<String>,
    /// The image's own name.
    #[serde(default)]
    filename: String,
    /// Properties specific to the format.
    #[serde(rename = "format-specific", default)]
    specific: serde_json::Value,
}

impl QemuImage {
    /// Another file that holds a part of the content.
    fn reference(&self) -> Option<&str> {
        let data = &self.specific["data"];
        // An image that consists of one file is its own extent.
        let own = self.filename.strip_prefix("file:").unwrap_or(&self.filename);
        let extents = data["extents"].as_array().map_or(&[][..], Vec::as_slice);
        let names = extents.iter().filter_map(|extent| extent["filename"].as_str());
        let mut others = names.filter(|name| name.strip_prefix("file:").unwrap_or(name) != own);
        let data_file = || data["data-file"].as_str();
        self.backing_file.as_deref().or_else(data_file).or_else(|| others.next())
    }
}

#[derive(Serialize)]
struct Imported<'a> {
    source: &'a str,
    source_format: &'a str,
    target: &'a Path,
    size_bytes: u64,
    allocated_bytes: u64,
}

pub(super) fn run(options: &ImportOptions) -> CommandResult {
    let target = &options.target;
    // Held until the new image has been renamed to the target.
    let _replaced = claim_existing(target, options.force)?;
    let format = options.source_format.as_deref();
    let source_path = source_of(&options.source)?;
    let path = Path::new(&options.source);
    if fs::metadata(path).is_ok_and(|it| it.is_file() || it.file_type().is_block_device()) {
        // What cannot be opened has a message of `qemu-img`.
        if let Ok(file) = File::open(path) {
            template::check_marks(path, &file)?;
        }
    }
    if !options.follow_backing {
        // This check precedes `qemu-img info`, which opens some of the files that an image names.
        refuse_references(options, references::of(Path::new(&options.source), format))?;
    }
    let source = qemu_image_info(&source_path, format)?;
    if !options.follow_backing {
        let found = references::of(Path::new(&options.source), Some(&source.format));
        refuse_references(options, found.or_else(|| source.reference().map(str::to_owned)))?;
    }
    refuse_unseen(options, &source)?;
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
    let failed = |error: &io::Error| Failure::io("write", target, error);
    let (part, interrupted) = part(target, source.virtual_size).map_err(|error| failed(&error))?;
    convert(options, &source_path, &source, part.path())?;
    finish(part, target, options.force, &interrupted).map_err(|error| failed(&error))?;
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

/// The source as `qemu-img` reads it. A source is a path, an address with `://`, or a description
/// that begins with `json:{`. `qemu-img` would take what precedes a colon in a relative path for a
/// protocol: a file `nbd:x` for a server.
fn source_of(source: &str) -> CommandResult<String> {
    if Path::new(source).exists() {
        let is_plain = source.starts_with('/') || !source.contains(':');
        return Ok(if is_plain { source.to_owned() } else { format!("./{source}") });
    }
    if source.contains("://") || source.starts_with("json:{") {
        return Ok(source.to_owned());
    }
    Err(Failure::new(format!("there is no image {source}"))
        .advise("give the path of an image, or an address such as nbd://host/export"))
}

/// Claims the target, if it exists.
pub(super) fn claim_existing(target: &Path, force: bool) -> CommandResult<Option<Claim>> {
    match fs::symlink_metadata(target) {
        Err(_) => Ok(None),
        Ok(metadata) if !metadata.is_file() => {
            Err(Failure::new(format!("{} is not a regular file", target.display()))
                .advise("choose another path"))
        }
        Ok(_) if !force => Err(Failure::new(format!("{} exists", target.display()))
            .advise("choose another path, or replace it with --force: its data is lost")),
        Ok(_) => {
            let claim = Claim::take(target)?;
            claim.prepare(target, ImageChange::Replace)?;
            Ok(Some(claim))
        }
    }
}

/// Refuses an image that names another file: it can name any file of this host, and the reader of
/// the result could then read that file.
fn refuse_references(options: &ImportOptions, reference: Option<String>) -> CommandResult {
    let Some(reference) = reference else { return Ok(()) };
    Err(Failure::new(format!(
        "{} has a part of its content in another file: {:?}",
        options.source,
        reference.chars().take(200).collect::<String>()
    ))
    .advise(
        "if that file is part of the image, use --follow-backing; if this is a guest's raw disk, use \
         --source-format raw",
    ))
}

/// Refuses images that `qemu-img` mistakes for raw ones: a VHD image without a header, and a DMG
/// image.
fn refuse_unseen(options: &ImportOptions, source: &QemuImage) -> CommandResult {
    if options.source_format.is_some() || source.format != "raw" {
        return Ok(());
    }
    let Ok(file) = File::open(&options.source) else { return Ok(()) };
    let length = file.metadata().map_or(0, |metadata| metadata.len());
    match ForeignFormat::of(&file, length) {
        Ok(Some(format)) => Err(Failure::new(format!(
            "{} looks like a {format} image, which qemu-img does not recognise",
            options.source
        ))
        .advise(format!(
            "use --source-format {}, or --source-format raw if it is raw",
            format.qemu_name()
        ))),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// Creates a file beside the target, with access for its owner only. It is renamed to the target
/// when it is complete, and removed when a signal ends the process before.
pub(super) fn part(target: &Path, size: u64) -> io::Result<(NamedTempFile, Interrupted)> {
    let interrupted = Interrupted::watch()?;
    // While the lock is held, no signal ends the process: the file is removed on a signal only once
    // `removed` names it.
    let mut removed = interrupted.part();
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".");
    let folder = parent(target).unwrap_or(Path::new("."));
    // Opened with O_EXCL, and with mode 0600.
    let part = tempfile::Builder::new().prefix(&name).suffix(".part").tempfile_in(folder)?;
    // Disks are made of whole sectors.
    part.as_file().set_len(size.next_multiple_of(512))?;
    *removed = Some(part.path().to_owned());
    drop(removed);
    Ok((part, interrupted))
}

fn parent(path: &Path) -> Option<&Path> {
    path.parent().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p })
}

/// The sizes of an image of any format, in bytes.
///
/// # Errors
/// If `qemu-img` is not installed or cannot read the image.
pub fn qemu_image_info(source: &str, format: Option<&str>) -> CommandResult<QemuImage> {
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

pub(super) fn absent(error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::NotFound {
        Failure::new("qemu-img, which reads foreign image formats, is not installed").advise(
            "install it: apt install qemu-utils (Debian, Ubuntu), dnf install qemu-img (Fedora)",
        )
    } else {
        Failure::new(format!("qemu-img does not start: {error}"))
    }
}

/// Why `qemu-img` has failed.
pub(super) fn reason(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().next().unwrap_or("no reason given");
    line.strip_prefix("qemu-img: ").unwrap_or(line).to_owned()
}

fn refused(source: &str, output: &Output) -> Failure {
    let line = reason(output);
    let failure = Failure::new(format!("qemu-img cannot read {source}: {line}"));
    if line.contains("lock") {
        failure.advise("the image is in use: stop the virtual machine first")
    } else if line.contains("Unknown driver") {
        failure.advise("`qemu-img --help` lists the formats it knows")
    } else {
        failure
    }
}

fn convert(
    options: &ImportOptions,
    source_path: &str,
    source: &QemuImage,
    part: &Path,
) -> CommandResult {
    // The target exists and has its size, and a new file reads as zeroes.
    let fixed = ["convert", "-p", "-n", "--target-is-zero", "-O", "raw", "-f"];
    let mut arguments: Vec<OsString> = fixed.map(Into::into).into();
    // The format is fixed to the one that was checked, even if the image has changed since.
    arguments.push((&source.format).into());
    arguments.push("--".into());
    arguments.push(source_path.into());
    arguments.push(part.into());
    let mut command = Command::new("qemu-img");
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = spawn_bound(&mut command).map_err(|error| absent(&error))?;
    let label = format!("Importing {}", options.source);
    let mut progress = Progress::new(label, source.virtual_size).silent(options.format.json);
    let mut text = Vec::new();
    let mut buffer = [0; 256];
    if let Some(stdout) = &mut child.stdout {
        while let Ok(count @ 1..) = stdout.read(&mut buffer) {
            text.extend_from_slice(&buffer[..count]);
            if let Some(share) = parse_progress(&text) {
                progress.update((share * source.virtual_size as f64) as u64);
                // Keep the beginning of an incomplete report.
                let keep = text.len().saturating_sub(32);
                text.drain(..keep);
            }
        }
    }
    drop(progress);
    let output = child
        .wait_with_output()
        .map_err(|error| Failure::new(format!("cannot wait for qemu-img: {error}")))?;
    if !output.status.success() {
        return Err(refused(&options.source, &output));
    }
    Ok(())
}

/// The last complete progress report in the output of `qemu-img -p` so far, as a fraction of 1. A
/// report is `    (12.34/100%)` and a carriage return.
pub fn parse_progress(text: &[u8]) -> Option<f64> {
    let text = String::from_utf8_lossy(text);
    let reports = text.split('(').filter_map(|report| report.split_once("/100%)"));
    let share: f64 = reports.filter_map(|(percent, _)| percent.trim().parse().ok()).next_back()?;
    Some((share / 100.0).clamp(0.0, 1.0))
}

/// Makes the data durable, renames the file, and makes the name durable.
pub(super) fn finish(
    part: NamedTempFile,
    target: &Path,
    replace: bool,
    interrupted: &Interrupted,
) -> io::Result<()> {
    part.as_file().sync_all()?;
    // While the lock is held, no signal ends the process: after the renaming the file must not be
    // removed.
    let mut removed = interrupted.part();
    if replace {
        part.persist(target)?;
    } else {
        part.persist_noclobber(target)?;
    }
    *removed = None;
    drop(removed);
    sync_directory(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colon_in_a_path_is_no_protocol() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a:b.qcow2");
        File::create(&path).unwrap();
        let absolute = path.to_str().unwrap();
        assert_eq!(source_of(absolute).unwrap(), absolute);
        // Relative to this crate's folder.
        assert_eq!(source_of("Cargo.toml").unwrap(), "Cargo.toml");
        assert!(source_of("nbd:x").is_err() && source_of("file:Cargo.toml").is_err());
        for other in ["nbd://host/a", "json:{}"] {
            assert_eq!(source_of(other).unwrap(), other);
        }
    }

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
