//! `fathom disk info`: shows an image, or a disk of the running daemon.
use std::{
    io,
    path::{Path, PathBuf},
};

use fathom_control::{Bytes, DiskStatus, FrontendStatus, LayerFigure, ModelKind, count};
use fathom_image::{ForeignFormat, Loss, Mark, MarkKind, MarkedImage, MarkedMove, MoveSide};
use serde::Serialize;

use super::moving;
use super::{
    InfoOptions, exact,
    holders::{self, Holder},
    image::{self, Image, read_up_to},
    is_path, partitions, signatures,
};
use crate::{
    failure::{CommandResult, Failure, reason},
    output::{
        self,
        sheet::Sheet,
        style::{self, Style},
        table::{Table, TableColumn},
    },
    usage::insight,
};

/// The state folder of the service in `packaging/`.
pub(super) const SERVICE_STATE: &str = "/var/lib/fathom";

pub(super) fn run(options: &InfoOptions) -> CommandResult {
    if is_path(&options.disk, &options.control.client()) {
        return show_image(Path::new(&options.disk), options);
    }
    let status = options.control.client().disk(&options.disk).map_err(|error| {
        let unreachable = matches!(error, fathom_control::ClientError::Unreachable { .. });
        let failure = Failure::from(error);
        if unreachable {
            Failure::new(format!(
                "there is no image {}, and no daemon that could have a disk of that name",
                options.disk
            ))
            .advise("give the path of an image, or start the daemon with `fathom serve`")
        } else {
            failure
        }
    })?;
    if options.format.json {
        return output::json(&status);
    }
    output::text_line(&disk_sheet(&status).render(output::width(), Style::stdout()))
}

/// The properties of an image that `--json` prints.
#[derive(Serialize)]
struct ImageInfo<'a> {
    path: &'a Path,
    size_bytes: u64,
    allocated_bytes: u64,
    block_device: bool,
    holes: u64,
    holes_bytes: u64,
    file_system: Option<String>,
    mount_point: Option<String>,
    free_bytes: Option<u64>,
    content: Option<String>,
    /// Whether the content looks like an image of another format than raw.
    foreign: bool,
    /// Whether a process has locked it; `None` if the file system has no locks.
    locked: Option<bool>,
    partition_table: Option<partitions::PartitionTable>,
    holders: Vec<Holder>,
    /// The daemon's record of acknowledged writes that may be lost.
    writes_lost: Option<WritesLost>,
    /// The path of the log that may hold the last changes.
    log: Option<String>,
    /// The path of the cache that may have blocks of it.
    cache: Option<String>,
    /// Why it is not the content of a disk: the disk has moved, or is about to.
    moved: Option<String>,
}

/// The folders in which a daemon writes its records.
pub fn folders_of_daemons(control: &Path) -> Vec<PathBuf> {
    let state = std::env::var_os("STATE_DIRECTORY").map(PathBuf::from);
    let folders = [state, control.parent().map(Path::to_owned), Some(SERVICE_STATE.into())];
    folders.into_iter().flatten().collect()
}

/// What the mark of a move says.
fn moved_text(marked: &MarkedMove) -> String {
    match marked.side {
        MoveSide::Incomplete => format!("an incomplete copy of {}", marked.other),
        MoveSide::Left => format!("the former content of a disk that moved to {}", marked.other),
    }
}

/// A record of lost writes.
#[derive(Serialize)]
struct WritesLost {
    errno: i32,
    /// The kernel's error when the writes were lost.
    error: String,
    /// The file that holds the record; absent if the record is an attribute of the image.
    recorded_in: Option<PathBuf>,
}

impl From<Loss> for WritesLost {
    fn from(Loss { errno, file }: Loss) -> Self {
        let error = reason(&io::Error::from_raw_os_error(errno));
        Self { errno, error, recorded_in: file }
    }
}

fn show_image(path: &Path, options: &InfoOptions) -> CommandResult {
    let image = Image::open(path)?;
    let (holes, holes_bytes) = image.holes();
    let failed = |error| Failure::io("read", path, &error);
    let head = read_up_to(&image.file, 0, signatures::LENGTH).map_err(failed)?;
    let foreign = ForeignFormat::of(&image.file, image.size).map_err(failed)?;
    let below = image::file_system(path);
    let mut info = ImageInfo {
        path,
        size_bytes: image.size,
        allocated_bytes: image.allocated,
        block_device: image.is_device,
        holes,
        holes_bytes,
        file_system: below.as_ref().map(|b| b.kind.clone()),
        mount_point: below
            .as_ref()
            .and_then(|b| b.mount_point.as_ref())
            .map(|point| point.display().to_string()),
        free_bytes: below.as_ref().map(|b| b.free),
        content: match foreign {
            Some(format) => Some(format!("{format} image")),
            None => signatures::recognise(&head).map(str::to_owned),
        },
        foreign: foreign.is_some(),
        locked: fathom_image::is_locked(&image.file),
        partition_table: partitions::read(&image.file, image.size).map_err(failed)?,
        holders: holders::of(path),
        writes_lost: None,
        log: None,
        cache: None,
        moved: None,
    };
    let folders = folders_of_daemons(&options.control.socket());
    let marked = MarkedImage { path: &image.path, file: &image.file, folders: &folders };
    // A mark that cannot be read is shown by who needs it.
    for mark in MarkKind::ALL.iter().filter_map(|kind| kind.read(&marked).ok()?) {
        match mark {
            Mark::Log(log) => info.log = Some(log.path),
            Mark::Cache(cache) => info.cache = Some(cache.path),
            Mark::Loss(loss) => info.writes_lost = Some(loss.into()),
            Mark::Move(marked) => info.moved = Some(moved_text(&marked)),
        }
    }
    if options.format.json {
        return output::json(&info);
    }
    output::text_line(&info.text())
}

impl ImageInfo<'_> {
    fn text(&self) -> String {
        let style = Style::stdout();
        let mut sheet = Sheet::default();
        let kind = if self.block_device { "block device" } else { "image" };
        sheet.fact(kind, self.path.display().to_string());
        sheet.fact("size", exact(self.size_bytes));
        if !self.block_device {
            let share = 100.0 * self.allocated_bytes as f64 / self.size_bytes.max(1) as f64;
            sheet.fact("allocated", format!("{}, {share:.0} %", Bytes(self.allocated_bytes)));
            sheet.fact("holes", format!("{}, {} in total", self.holes, Bytes(self.holes_bytes)));
        }
        if let (Some(kind), Some(free)) = (&self.file_system, self.free_bytes) {
            let point = self.mount_point.as_deref().unwrap_or("?");
            if !self.block_device {
                sheet.fact("file system", format!("{kind} at {point}, {} free", Bytes(free)));
            }
        }
        sheet.fact("content", self.content());
        for holder in &self.holders {
            sheet.fact("held by", holder.to_string());
        }
        match self.locked {
            Some(true) if !self.holders.iter().any(|holder| holder.locks) => {
                sheet.fact("held by", "a process that holds its lock and is not visible from here");
            }
            None if self.holders.is_empty() => {
                sheet.fact("held by", "no visible process; the file system has no locks");
            }
            _ if self.holders.is_empty() => sheet.fact("held by", "no process"),
            _ => {}
        }
        if let Some(log) = &self.log {
            let text = format!(
                "the last changes may be in the log at {log}: it is served with that log only"
            );
            sheet.fact("log", text);
        }
        if let Some(cache) = &self.cache {
            sheet.fact("cache", format!("the cache at {cache} may have blocks of it"));
        }
        if let Some(moved) = &self.moved {
            sheet.fact("move", format!("{moved}; it is not served until `fathom disk recover`"));
        }
        if let Some(lost) = &self.writes_lost {
            let place = lost
                .recorded_in
                .as_ref()
                .map_or_else(String::new, |file| format!(" (recorded in {})", file.display()));
            sheet.fact(
                "problem",
                format!(
                    "writes-lost: acknowledged writes may be lost: {}{place}; a daemon serves \
                     it read-only until `fathom disk recover`",
                    lost.error
                ),
            );
        }
        let mut text = sheet.render(output::width(), style);
        if let Some(name) = self.content.as_ref().filter(|_| self.foreign) {
            text += &format!(
                "\n\n{} This is a {name}, not a raw one. If it is served as it is, guests see its \
                 raw bytes.\nConvert it: fathom disk import {} NEW.img",
                style.paint(style::WARNING, "!"),
                self.path.display()
            );
        }
        if let Some(table) = &self.partition_table {
            text += &format!("\n\n{}", partition_table(table));
            for problem in &table.problems {
                text += &format!("\n{} {problem}", style.paint(style::WARNING, "!"));
            }
        }
        text
    }

    fn content(&self) -> String {
        match (&self.partition_table, &self.content) {
            (Some(table), _) => {
                let partitions = count(table.partitions.len(), "partition");
                format!("{} partition table, {partitions}", table.kind)
            }
            (None, Some(name)) => name.clone(),
            (None, None) if !self.block_device && self.allocated_bytes == 0 => "empty".into(),
            (None, None) => "not recognised".into(),
        }
    }
}

fn partition_table(table: &partitions::PartitionTable) -> String {
    let mut text = Table::new([
        TableColumn::number("PARTITION"),
        TableColumn::number("START").importance(1),
        TableColumn::number("SIZE"),
        TableColumn::text("CONTENT"),
        TableColumn::text("NAME").flexible().importance(2),
    ]);
    for partition in &table.partitions {
        text.row([
            partition.number.to_string(),
            Bytes(partition.start).to_string(),
            Bytes(partition.length).to_string(),
            partition.content.unwrap_or("–").to_owned(),
            partition.name.clone(),
        ]);
    }
    text.render(output::width(), Style::stdout())
}

/// The sheet of a disk of the daemon.
pub(super) fn disk_sheet(status: &DiskStatus) -> Sheet {
    let mut sheet = Sheet::default();
    sheet.fact("disk", status.name.clone());
    sheet.fact_if_any("machine", status.vm.clone());
    sheet.fact_if_any("serial", status.serial.clone());
    sheet.fact("size", exact(status.capacity_bytes));
    sheet.fact("access", if status.read_only { "read only" } else { "read and write" });
    let geometry = &status.geometry;
    sheet.fact(
        "blocks",
        format!("{} bytes, {} beneath", geometry.block_size, geometry.physical_block_size),
    );
    let can = &status.capabilities;
    let offered = [
        (can.flush, "flush"),
        (can.force_unit_access, "FUA"),
        (can.discard, "discard"),
        (can.write_zeroes, "write zeroes"),
        (can.extents, "block status"),
    ];
    let offered: Vec<&str> = offered.iter().filter(|o| o.0).map(|o| o.1).collect();
    sheet.fact_if_any("offers", offered.join(", "));
    let layers: Vec<&str> = status.layers.iter().map(|layer| layer.name.as_str()).collect();
    sheet.fact_if_any("layers", layers.join(" → "));
    for layer in &status.layers {
        sheet.fact_if_any(&layer.name, figures_text(&layer.figures));
        for store in &layer.stores {
            let name = format!("{}, {}", layer.name, store.name);
            sheet.fact_if_any(&name, figures_text(&store.figures));
        }
    }
    let backend = &status.backend;
    let mut below = backend.name.clone();
    if let Some(place) = backend.place() {
        below += &format!(" {place}");
    }
    if backend.direct {
        below += ", direct";
    }
    if let Some(model) = &backend.model {
        below += match model.kind {
            ModelKind::Hdd => ", with the timing of a hard disk",
            ModelKind::Ssd => ", with the timing of an SSD",
            ModelKind::SataSsd => ", with the timing of a SATA SSD",
        };
    }
    sheet.fact("back end", below);
    for (file, depth) in backend.chain.iter().skip(1).zip(1..) {
        let name =
            if depth == 1 { "backing file".to_owned() } else { format!("backing file {depth}") };
        sheet.fact(&name, format!("{} {}", file.format, file.path));
    }
    sheet.fact_if_any(&backend.name, figures_text(&backend.figures));
    if let Some(moving) = &status.moving {
        sheet.fact("move", moving::text(moving));
    }
    for frontend in &status.frontends {
        let (name, value) = frontend_text(frontend);
        sheet.fact(name, value);
    }
    sheet.fact("insight", insight::long(&status.insight));
    if status.refused > 0 {
        sheet.fact("refused", count(status.refused, "request"));
    }
    for problem in &status.problems {
        let mut text = format!("{}: {}", problem.kind.name(), problem.message);
        if !problem.remedy.is_empty() {
            text += &format!("; {}", problem.remedy);
        }
        sheet.fact("problem", text);
    }
    sheet
}
fn figures_text(figures: &[LayerFigure]) -> String {
    let texts = figures.iter().map(|one| output::figure(&one.name, one.value));
    texts.collect::<Vec<_>>().join(", ")
}

fn frontend_text(frontend: &FrontendStatus) -> (&'static str, String) {
    match frontend {
        FrontendStatus::VhostUser(status) => {
            let mut text = status.socket.clone();
            if status.connected {
                text += &format!(
                    ", guest connected, {} of {} in use, {} of memory",
                    status.queues_active,
                    count(status.queues_max, "queue"),
                    Bytes(status.guest_memory_bytes)
                );
            } else {
                text += &format!(", no guest, {}", count(status.queues_max, "queue"));
            }
            if status.refused > 0 {
                text += &format!(", {} refused", count(status.refused, "malformed request"));
            }
            if let Some(problem) = &status.problem {
                text += &format!("; {problem}");
            }
            ("vhost-user", text)
        }
        FrontendStatus::Nbd(status) => (
            "NBD",
            format!(
                "{} as {:?}, {}",
                status.address,
                status.export,
                count(status.connections, "connection")
            ),
        ),
    }
}
