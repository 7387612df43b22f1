//! `fathom disk resize`: resizes an image, or a disk in use by a guest.
use std::{fs, os::unix::fs::MetadataExt, path::Path};

use fathom_control::{Bytes, Client, FrontendStatus, parse_bytes};
use fathom_image::{ForeignFormat, ImageChange};
use serde::Serialize;

use super::{
    ResizeOptions, claim::Claim, create::check_size, exact, image::Image, is_path, partitions,
};
use crate::{
    failure::{CommandResult, Failure},
    output,
};

/// A new size, or a change of the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Absolute(u64),
    Grow(u64),
    Shrink(u64),
}

impl Target {
    fn parse(text: &str) -> CommandResult<Self> {
        let (make, size): (fn(u64) -> Self, &str) = match text.as_bytes().first() {
            Some(b'+') => (Self::Grow, &text[1..]),
            Some(b'-') => (Self::Shrink, &text[1..]),
            _ => (Self::Absolute, text),
        };
        parse_bytes(size).map(make).map_err(|error| Failure::usage(error.to_string()))
    }

    fn apply(self, size: u64) -> CommandResult<u64> {
        let result = match self {
            Self::Absolute(size) => Some(size),
            Self::Grow(by) => size.checked_add(by),
            Self::Shrink(by) => size.checked_sub(by),
        };
        result.ok_or_else(|| Failure::usage(format!("not possible for a size of {}", Bytes(size))))
    }
}

#[derive(Serialize)]
struct Resized<'a> {
    disk: &'a str,
    online: bool,
    size_bytes_before: u64,
    size_bytes: u64,
}

pub(super) fn run(options: &ResizeOptions) -> CommandResult {
    let target = Target::parse(&options.size)?;
    let client = options.control.client();
    let mut note = None;
    let (served, before, size) = if is_path(&options.disk, &client) {
        let path = Path::new(&options.disk);
        let image = Image::open(path)?;
        if let Some(name) = served_as(&client, path) {
            let size = new_size(options, target, image.size)?;
            (Some(client.resize_disk(&name, size, options.shrink)?), image.size, size)
        } else {
            let (before, size) = resize_image(options, target, &image)?;
            note = grown_table(&image, size);
            (None, before, size)
        }
    } else {
        let before = client.disk(&options.disk)?.capacity_bytes;
        let size = new_size(options, target, before)?;
        let status = client.resize_disk(&options.disk, size, options.shrink)?;
        let size = status.capacity_bytes;
        (Some(status), before, size)
    };
    if options.format.json {
        let disk = &options.disk;
        return output::json(&Resized {
            disk,
            online: served.is_some(),
            size_bytes_before: before,
            size_bytes: size,
        });
    }
    let how = served.map_or_else(String::new, |status| who_sees_it(&status.frontends));
    output::text_line(&format!("{}: {} → {}{how}", options.disk, Bytes(before), exact(size)))?;
    note.map_or(Ok(()), |note| output::text_line(&note))
}

/// Who sees the new size of a disk that the daemon serves, and when.
fn who_sees_it(frontends: &[FrontendStatus]) -> String {
    let mut seen = Vec::new();
    for frontend in frontends {
        match frontend {
            FrontendStatus::VhostUser(guest) if guest.connected => {
                seen.push(if guest.announces_sizes {
                    "its guest sees it at once"
                } else {
                    "its guest sees it after a restart, because its VMM cannot be told"
                });
            }
            FrontendStatus::Nbd(export) if export.connections > 0 => {
                seen.push("NBD clients see it when they connect again");
            }
            FrontendStatus::VhostUser(_) | FrontendStatus::Nbd(_) => {}
        }
    }
    seen.dedup();
    let begin = ", through the daemon";
    if seen.is_empty() { begin.into() } else { format!("{begin}: {}", seen.join(", ")) }
}

fn new_size(options: &ResizeOptions, target: Target, before: u64) -> CommandResult<u64> {
    let size = target.apply(before)?;
    check_size(size)?;
    if size < before && !options.shrink {
        return Err(Failure::new(format!(
            "{} is smaller than {} is now ({})",
            Bytes(size),
            options.disk,
            Bytes(before)
        ))
        .advise(
            "--shrink allows it; data beyond the new end is lost, so shrink the file \
                 systems in it first",
        ));
    }
    Ok(size)
}

/// The name of the daemon's disk with this image, if a daemon runs and has such a disk.
pub(super) fn served_as(client: &Client, path: &Path) -> Option<String> {
    let same = |other: &str| {
        let (Ok(ours), Ok(theirs)) = (fs::metadata(path), fs::metadata(other)) else {
            return false;
        };
        (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino())
    };
    let disks = client.disks().ok()?.disks;
    disks.into_iter().find(|disk| disk.backend.image.as_deref().is_some_and(same)).map(|d| d.name)
}

/// Resizes an image that is not in use. Returns the sizes before and after, in bytes.
fn resize_image(
    options: &ResizeOptions,
    target: Target,
    image: &Image,
) -> CommandResult<(u64, u64)> {
    let path = image.path.as_path();
    if image.is_device {
        return Err(Failure::new(format!("{} is a block device", path.display()))
            .advise("resize it with the tool that made it (lvextend, …); served disks follow"));
    }
    let failed = |error| Failure::io("resize", path, &error);
    let claim = Claim::take(path)?;
    let file = claim.file();
    // From here on the lock prevents changes of the size.
    let before = file.metadata().map_err(failed)?.len();
    let size = new_size(options, target, before)?;
    if options.image_format.is_none() {
        refuse_foreign(path, ForeignFormat::of(file, before).map_err(failed)?)?;
    }
    let change = if size < before { ImageChange::Shrink } else { ImageChange::Grow };
    claim.prepare(path, change)?;
    file.set_len(size).and_then(|()| file.sync_all()).map_err(failed)?;
    claim.finish(path, change)?;
    Ok((before, size))
}

/// Refuses an image of another format: its size is not the size of its disk.
fn refuse_foreign(path: &Path, format: Option<ForeignFormat>) -> CommandResult {
    let Some(format) = format else { return Ok(()) };
    let shown = path.display();
    Err(Failure::new(format!("{shown} looks like a {format} image, not a raw one")).advise(
        format!(
            "`qemu-img resize -f {} {shown} …` resizes its disk; --format raw treats it as raw",
            format.qemu_name()
        ),
    ))
}

/// A note on a GPT whose copy at the end does not move when the image grows.
fn grown_table(image: &Image, size: u64) -> Option<String> {
    let table = partitions::read(&image.file, image.size).ok()??;
    (table.kind == "GPT" && size > image.size).then(|| {
        "Its GPT still ends at the old size: in the guest, run `sgdisk --move-second-header`, then \
         grow the partition and the file system."
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use fathom_control::{NbdStatus, VhostUserStatus};

    use super::*;

    #[test]
    fn only_guests_that_can_be_told_see_a_new_size_at_once() {
        let guest = |connected, announces_sizes| {
            let socket = "a.sock".into();
            let status =
                VhostUserStatus { socket, connected, announces_sizes, ..Default::default() };
            FrontendStatus::VhostUser(status)
        };
        let clients =
            |connections| FrontendStatus::Nbd(NbdStatus { connections, ..NbdStatus::default() });
        let shown = |frontends: Vec<FrontendStatus>| who_sees_it(&frontends);
        assert_eq!(shown(vec![guest(false, false), clients(0)]), ", through the daemon");
        assert!(shown(vec![guest(true, true)]).ends_with(": its guest sees it at once"));
        assert!(shown(vec![guest(true, false)]).contains("after a restart"));
        let both = shown(vec![guest(true, true), clients(2), clients(1)]);
        assert!(both.ends_with("at once, NBD clients see it when they connect again"), "{both}");
    }

    #[test]
    fn sizes_are_absolute_or_changes() {
        let apply = |text: &str| Target::parse(text).and_then(|t| t.apply(10 << 30)).ok();
        assert_eq!(apply("20G"), Some(20 << 30));
        assert_eq!(apply("+5G"), Some(15 << 30));
        assert_eq!(apply("-5G"), Some(5 << 30));
        assert_eq!(apply("-11G"), None);
        assert_eq!(apply("++1G"), None);
        assert_eq!(apply("much"), None);
    }
}
