//! `fathom cache check`: examines a cache that is not in use. The bytes may be anything.
use std::{io, os::unix::fs::FileExt, path::Path};

use fathom_cache::{
    CachedBlock, DiskSummary, Inspection,
    format::{GRANULE, PAGE_LENGTH, Superblock, checksum},
};
use fathom_control::{Bytes, count};
use serde::Serialize;

use super::{
    CheckOptions,
    logs::{self, Log},
    volume::Volume,
};
use crate::{
    failure::{CommandResult, Failure},
    output::{
        self,
        progress::Progress,
        sheet::Sheet,
        style::{self, Style},
        table::{Table, TableColumn},
        text::clean,
    },
};

/// The pages that are read at once.
const PAGES: u32 = 64;
/// The number of wrong or unreadable blocks of which each is shown.
const SHOWN_MAX: usize = 100;

#[derive(Serialize)]
struct Disk {
    name: String,
    image: String,
    blocks: u64,
    bytes: u64,
    changed_regions: u64,
    dropped_blocks: u64,
    attached: bool,
}

#[derive(Serialize)]
struct Checked<'a> {
    path: &'a Path,
    size_bytes: u64,
    block_size_bytes: u32,
    blocks_max: u32,
    blocks: u64,
    disks_max: u32,
    disks: Vec<Disk>,
    torn_pages: u64,
    damaged_pages: u64,
    duplicates: u64,
    /// The most logs, and the logs there are.
    logs_max: u32,
    logs: Vec<Log>,
    /// The bytes of blocks that were compared with their checksums.
    data_bytes: u64,
    wrong_granules: u64,
    problems: Vec<String>,
}

pub(super) fn run(options: &CheckOptions) -> CommandResult {
    let path = &options.path;
    let volume = Volume::open(path, false)?;
    let format = volume.superblock(path)?;
    let mut reader = Reader { data: options.data, ..Reader::new(&volume) };
    let inspection =
        reader.pages(format, options).map_err(|error| Failure::io("read", path, &error))?;
    let logs = logs::logs(&volume, &format, options.format.json)
        .map_err(|error| Failure::io("read the logs of", path, &error))?;
    let checked = report(path, &volume, &format, &inspection, (reader, logs));
    if options.format.json {
        output::json(&checked)?;
    } else {
        checked.show()?;
    }
    checked.verdict()
}

/// Reads pages and blocks.
struct Reader<'v> {
    volume: &'v Volume,
    data: bool,
    data_bytes: u64,
    wrong: u64,
    problems: Vec<String>,
    granule: Vec<u8>,
}

impl<'v> Reader<'v> {
    fn new(volume: &'v Volume) -> Self {
        let granule = vec![0; GRANULE as usize];
        Self { volume, data: false, data_bytes: 0, wrong: 0, problems: Vec::new(), granule }
    }

    fn pages(&mut self, format: Superblock, options: &CheckOptions) -> io::Result<Inspection> {
        let total = u64::from(format.pages()) * 2 * PAGE_LENGTH as u64;
        let label = format!("Reading {}", options.path.display());
        let mut progress = Progress::new(label, total).silent(options.format.json);
        let mut inspection = Inspection::new(format);
        let mut bytes = vec![0; PAGES as usize * 2 * PAGE_LENGTH];
        let mut blocks = Vec::new();
        let mut first = 0;
        while first < format.pages() {
            let pages = PAGES.min(format.pages() - first);
            let bytes = &mut bytes[..pages as usize * 2 * PAGE_LENGTH];
            self.volume.file.read_exact_at(bytes, format.page_offset(first, 0))?;
            for (page, copies) in (first..).zip(bytes.chunks(2 * PAGE_LENGTH)) {
                inspection.page(page, copies, |block| blocks.push(block));
                for block in blocks.drain(..) {
                    if self.data {
                        self.block(&block, &inspection);
                    }
                }
            }
            first += pages;
            progress.update(u64::from(first) * 2 * PAGE_LENGTH as u64);
        }
        Ok(inspection)
    }

    /// Compares the content of a block with its checksums.
    fn block(&mut self, block: &CachedBlock, inspection: &Inspection) {
        for granule in (0..16).filter(|granule| block.valid >> granule & 1 == 1) {
            let within = u64::from(granule * GRANULE);
            let read = self.volume.file.read_exact_at(&mut self.granule, block.place + within);
            self.data_bytes += u64::from(GRANULE);
            let noted = block.sums.get(granule as usize).copied().unwrap_or_default();
            let what = match read {
                Ok(()) if checksum(&self.granule) == noted => continue,
                Ok(()) => "is not what was written".to_owned(),
                Err(error) => format!("cannot be read: {}", crate::failure::reason(&error)),
            };
            self.wrong += 1;
            if self.problems.len() < SHOWN_MAX {
                let disk = inspection.disks.get(&block.disk);
                let disk = disk.map_or_else(String::new, |disk| clean(&disk.record.owner.name));
                let (place, offset) = (block.place + within, block.offset + within);
                self.problems.push(format!("byte {place}, of {disk} at {offset}, {what}"));
            }
        }
    }
}

fn report<'a>(
    path: &'a Path,
    volume: &Volume,
    format: &Superblock,
    inspection: &Inspection,
    (reader, logs): (Reader<'_>, Vec<Log>),
) -> Checked<'a> {
    let disk = |disk: &DiskSummary| Disk {
        name: disk.record.owner.name.clone(),
        image: disk.record.owner.home.clone(),
        blocks: disk.blocks,
        bytes: disk.bytes,
        changed_regions: disk.active,
        dropped_blocks: disk.dropped,
        attached: disk.record.generation != 0,
    };
    let disks: Vec<Disk> = inspection.disks.values().map(disk).collect();
    let mut problems = Vec::new();
    if inspection.damaged > 0 {
        let pages = count(inspection.damaged, "page");
        problems.push(format!("{pages} without a sound copy: their blocks are lost to the cache"));
    }
    if inspection.duplicates > 0 {
        problems.push(format!("{} twice", count(inspection.duplicates, "block")));
    }
    problems.extend(reader.problems);
    for log in logs.iter().filter(|log| !log.problem.is_empty()) {
        problems.push(format!("the log at byte {} cannot be read: {}", log.offset, log.problem));
    }
    Checked {
        path,
        size_bytes: volume.size,
        block_size_bytes: format.block_size,
        blocks_max: format.slots,
        blocks: disks.iter().map(|disk| disk.blocks).sum(),
        disks_max: format.disks,
        disks,
        torn_pages: inspection.torn,
        damaged_pages: inspection.damaged,
        duplicates: inspection.duplicates,
        logs_max: format.logs,
        logs,
        data_bytes: reader.data_bytes,
        wrong_granules: reader.wrong,
        problems,
    }
}

impl Checked<'_> {
    fn show(&self) -> CommandResult {
        let style = Style::stdout();
        let mut sheet = Sheet::default();
        sheet.fact("cache", self.path.display().to_string());
        sheet.fact("size", Bytes(self.size_bytes).to_string());
        let block_size = Bytes(u64::from(self.block_size_bytes));
        sheet.fact("blocks", format!("{} of {} with {block_size}", self.blocks, self.blocks_max));
        sheet.fact("disks", format!("{} of {}", self.disks.len(), self.disks_max));
        if self.logs_max > 0 {
            sheet.fact("logs", format!("{} of {}", self.logs.len(), self.logs_max));
        }
        if self.torn_pages > 0 {
            let pages = count(self.torn_pages, "page");
            sheet
                .fact("torn", format!("{pages}, as a crash leaves them: their blocks are dropped"));
        }
        if self.data_bytes > 0 {
            let data = Bytes(self.data_bytes);
            sheet.fact(
                "data",
                format!("{data} compared with checksums, {} wrong", self.wrong_granules),
            );
        }
        output::text_line(&sheet.render(output::width(), style))?;
        if !self.disks.is_empty() {
            output::text_line("")?;
            output::text_line(&self.table().render(output::width(), style))?;
        }
        if !self.logs.is_empty() {
            output::text_line("")?;
            output::text_line(&self.log_table().render(output::width(), style))?;
        }
        for problem in &self.problems {
            output::text_line(&format!("{} {problem}", style.paint(style::BAD, "✗")))?;
        }
        if self.wrong_granules > self.problems.len() as u64 {
            output::text_line(&format!("… {} wrong in all", count(self.wrong_granules, "part")))?;
        }
        Ok(())
    }

    fn table(&self) -> Table {
        let mut table = Table::new([
            TableColumn::text("DISK").flexible().kept(),
            TableColumn::text("IMAGE").flexible_path(16).importance(4),
            TableColumn::number("BLOCKS").kept(),
            TableColumn::number("DATA").importance(5),
            TableColumn::number("CHANGED").importance(3),
            TableColumn::number("DROPPED").importance(3),
        ]);
        for disk in &self.disks {
            table.row([
                clean(&disk.name),
                clean(&disk.image),
                if disk.attached { disk.blocks.to_string() } else { "detached".to_owned() },
                Bytes(disk.bytes).to_string(),
                count(disk.changed_regions, "region"),
                disk.dropped_blocks.to_string(),
            ]);
        }
        table
    }

    fn log_table(&self) -> Table {
        let mut table = Table::new([
            TableColumn::text("LOG OF").flexible().kept(),
            TableColumn::text("IMAGE").flexible_path(16).importance(4),
            TableColumn::number("AT BYTE").importance(2),
            TableColumn::number("RECORDS").importance(3),
            TableColumn::number("DIRTY").kept(),
        ]);
        for log in &self.logs {
            table.row([
                clean(&log.disk),
                clean(&log.image),
                log.offset.to_string(),
                log.records.to_string(),
                Bytes(log.bytes).to_string(),
            ]);
        }
        table
    }

    fn verdict(&self) -> CommandResult {
        if self.problems.is_empty() {
            return Ok(());
        }
        let shown = self.path.display();
        let remedy = if self.logs.iter().any(|log| !log.problem.is_empty()) {
            "a log may have changes that are nowhere else: restore the store of the cache"
                .to_owned()
        } else if self.wrong_granules > 0 {
            "the device does not hold what was written to it: replace it. No data is lost: all blocks are \
             on their disks"
                .to_owned()
        } else {
            format!("no data is lost. `fathom cache clear {shown}` makes it sound again")
        };
        let found = count(self.problems.len(), "problem");
        Err(Failure::new(format!("{shown}: {found} found")).advise(remedy))
    }
}
