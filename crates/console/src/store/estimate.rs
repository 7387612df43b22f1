//! `fathom store estimate`.

use std::path::PathBuf;

use clap::Args;
use fathom_control::Bytes;
use fathom_image::ForeignFormat;
use fathom_store::{Estimate, Estimator};
use serde::Serialize;

use super::open_device;
use crate::failure::{CommandResult, Failure};
use crate::output::progress::Progress;
use crate::output::{self, Format};

/// Options of `fathom store estimate`.
#[derive(Debug, Args)]
pub struct EstimateOptions {
    /// Raw images and block devices that are not in use
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
    #[command(flatten)]
    format: Format,
}

#[derive(Serialize)]
struct EstimateReport {
    images: usize,
    size_bytes: u64,
    data_bytes: u64,
    different_bytes: u64,
    error_bytes: u64,
}

pub(super) fn run(options: &EstimateOptions) -> CommandResult {
    let mut estimator = Estimator::default();
    for path in &options.images {
        let image = open_device(path, true)?;
        let foreign =
            std::fs::File::open(path).and_then(|file| ForeignFormat::of(&file, image.capacity()));
        if let Ok(Some(format)) = foreign {
            return Err(Failure::new(format!("{} is a {} image", path.display(), format.name()))
                .advise("`qemu-img convert -O raw` makes a raw one of it"));
        }
        let mut progress =
            Progress::new(path.display().to_string(), image.capacity()).silent(options.format.json);
        estimator
            .add(&image, |done| progress.update(done))
            .map_err(|error| Failure::io("read", path, &error))?;
    }
    let found = estimator.estimate();
    if options.format.json {
        return output::json(&EstimateReport {
            images: options.images.len(),
            size_bytes: found.bytes,
            data_bytes: found.data_bytes,
            different_bytes: found.different_bytes,
            error_bytes: found.error_bytes,
        });
    }
    output::text_line(&text(&found))
}

fn text(found: &Estimate) -> String {
    let percent = |bytes: u64| bytes as f64 * 100.0 / found.data_bytes.max(1) as f64;
    let saved = found.data_bytes.saturating_sub(found.different_bytes);
    let (all, data) = (Bytes(found.bytes), Bytes(found.data_bytes));
    let mut text = format!("{all}, of which {data} are not zeroes\n");
    text +=
        &format!("a pool would keep {} and save {}", Bytes(found.different_bytes), Bytes(saved));
    text += &format!(" ({:.1} %", percent(saved));
    if found.error_bytes > 0 {
        text += &format!(" ± {:.1}", percent(found.error_bytes).max(0.1));
    }
    text + " of the data) as equal blocks"
}
