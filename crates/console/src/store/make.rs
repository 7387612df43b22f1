//! `fathom store create`.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use clap::Args;
use fathom_control::Bytes;
use fathom_store::{MakeOptions, make};
use serde::Serialize;

use super::{about, open_device};
use crate::failure::{CommandResult, Failure};
use crate::output::progress::Progress;
use crate::output::{self, Format};

/// Options of `fathom store create`.
#[derive(Debug, Args)]
pub struct CreateOptions {
    /// The pool: a new file, or a block device whose beginning is zeroes
    #[arg(value_name = "POOL")]
    pool: PathBuf,
    /// The size of a new file, for example 100G
    size: Option<Bytes>,
    /// The size to which the pool can grow later [default: 4 times its size]
    #[arg(long, value_name = "SIZE")]
    max_size: Option<Bytes>,
    #[command(flatten)]
    format: Format,
}

#[derive(Serialize)]
struct Made<'a> {
    pool: &'a Path,
    size_bytes: u64,
    data_bytes: u64,
}

pub(super) fn run(options: &CreateOptions) -> CommandResult {
    let path = &options.pool;
    let is_device = fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    if !is_device {
        let size = options.size.ok_or_else(|| {
            Failure::usage("a new file needs a size").advise("add one, for example 100G")
        })?;
        create(path, size.0)?;
    } else if options.size.is_some() {
        return Err(Failure::usage("a block device has its own size").advise("leave the size out"));
    }
    let made = make_on(options);
    if made.is_err() && !is_device {
        // It was made by this command, and has nothing.
        let _ = fs::remove_file(path);
    }
    made
}

fn create(path: &Path, size: u64) -> CommandResult {
    let mut open = OpenOptions::new();
    open.read(true).write(true).create_new(true).mode(0o600);
    let file = open.open(path).map_err(|error| {
        let failure = Failure::io("create", path, &error);
        if error.kind() == io::ErrorKind::AlreadyExists {
            return failure.advise("choose another path, or remove the file");
        }
        failure
    })?;
    let sized = file.set_len(size).and_then(|()| file.sync_all());
    sized.map_err(|error| {
        let _ = fs::remove_file(path);
        Failure::io("create", path, &error)
    })
}

fn make_on(options: &CreateOptions) -> CommandResult {
    let path = &options.pool;
    let device = open_device(path, false)?;
    let mut make_options =
        MakeOptions::draw().map_err(|error| Failure::io("make", path, &error))?;
    make_options.capacity_max = options.max_size.map_or(0, |size| size.0);
    let mut progress = Progress::new(path.display().to_string(), 1000).silent(options.format.json);
    let layout = make(&device, &make_options, |share| progress.update((share * 1000.0) as u64))
        .map_err(|error| about(path, error))?;
    drop(progress);
    let (size_bytes, data_bytes) = (device.capacity(), layout.data_bytes());
    if options.format.json {
        return output::json(&Made { pool: path, size_bytes, data_bytes });
    }
    let text = format!("{}: a pool of {}", path.display(), Bytes(data_bytes));
    output::text_line(&format!("{text}; make volumes with `fathom store new`"))
}
