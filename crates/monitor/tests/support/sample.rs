//! Generates the recorded sample for the results in `docs/queries.md`: 73 seconds of two machines.

use std::fmt::Write as _;

const MS: u64 = 1_000_000;
/// The first instant of the sample.
const START: u64 = 1_000_000 * MS;
/// The time from the first instant to the last event.
const END: u64 = 73_000 * MS;

/// The columns of the sample.
const HEAD: &str = "BlktapTS,Type,IOOp,ReqId,Sector,Size,VMName,VDisk,PDisk,Kind,Class,Inode,Path,\
                    FileSize,FileSystem,Cgroup,Process,ProcessId,Device,Error,Flags,Source,\
                    Confidence,Queue";

/// Flags of the guest's kernel, as in the column `Flags`.
const SYNC: u32 = 4 << 8;
const META: u32 = 1 << 8;
const SWAP: u32 = 16 << 8;

/// The meaning of requests.
struct About {
    machine: &'static str,
    disk: &'static str,
    /// `Kind,Class,Inode,Path,FileSize,FileSystem,Cgroup,Process,ProcessId,Device`.
    meaning: String,
    flags: u32,
}

impl About {
    fn new(disk: &'static str, meaning: impl Into<String>, flags: u32) -> Self {
        let machine = if disk.starts_with("web") { "web" } else { "db" };
        Self { machine, disk, meaning: meaning.into(), flags }
    }

    /// A request for a file in the page cache.
    fn file(disk: &'static str, group: &str, inode: u32, path: &str, size: u32) -> Self {
        let system = if disk.starts_with("web") { "ext4" } else { "xfs" };
        let class =
            1 + u32::from(size > 4096) + u32::from(size > 65536) + u32::from(size > 1 << 20);
        Self::new(disk, format!("data,{class},{inode},{path},{size},{system},{group},,,vda1"), 0)
    }
}

/// The events generated so far.
#[derive(Default)]
struct Sample {
    lines: Vec<(u64, u64, String)>,
    requests: u64,
    random: u64,
}

impl Sample {
    /// A pseudorandom number below a bound; the sequence is the same in each run.
    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
        (self.random >> 33) % bound
    }

    /// Adds a request, and its response `micros` microseconds later.
    fn request(&mut self, at_ms: u64, about: &About, op: char, range: (u64, u64), micros: u64) {
        self.requests += 1;
        let came = at_ms * MS + self.below(400_000);
        let went = came + micros * 1_000 + self.below(20_000);
        let failed = range.0 == 666_624;
        for (time, kind) in [(came, 'Q'), (went, if failed { 'E' } else { 'R' })] {
            if time > END {
                continue;
            }
            let (id, (sector, size)) = (self.requests, range);
            let About { machine, disk, meaning, flags } = about;
            let error = if kind == 'E' { "input/output error" } else { "" };
            let known = if op == 'f' { "flags,sure" } else { "page,sure" };
            let line = format!(
                "{},{kind},{op},{id},{sector},{size},{machine},{disk},{disk}.img,{meaning},\
                 {error},{flags},{known},0",
                START + time
            );
            self.lines.push((time, id, line));
        }
    }

    /// Adds the regular activity of the machines for twelve seconds from an instant.
    fn usual(&mut self, from_ms: u64, every: u64) {
        let wal = "direct,6,901,/pg/wal/0000000100000007,16777216,xfs,/postgres,postgres,412,vda1";
        let wal = About::new("db-data", wal, SYNC);
        let table = About::file("db-data", "/postgres", 905, "/pg/base/16384", 50_331_648);
        let journal = About::new("web-root", "journal,1,,,,ext4,,,,vda1", SYNC | META);
        let inodes = About::new("web-root", "metadata,1,,,,ext4,,,,vda1", META);
        let flush = About::new("web-root", ",,,,,,,,,", 0);
        let fsync = About::new("db-data", ",,,,,,,,,", 0);
        for step in 0..12_000 / (every * 600) {
            let at = from_ms + step * every * 600;
            let (block, slow) = (from_ms * 8 + step * 16, self.below(60));
            self.request(at + 10, &wal, 'w', (block, 16), 180 + slow);
            if step % 3 == 0 {
                self.request(at + 12, &fsync, 'f', (0, 0), 900 + slow);
                let sector = 4_000_000 + 8 * self.below(50_000);
                self.request(at + 150, &table, 'r', (sector, 16), 400 + 4 * slow);
            }
            let session = self.below(5);
            let path = format!("/srv/sessions/s{session}");
            let session_file = About::file(
                "web-root",
                "/shop",
                300 + session as u32,
                &path,
                900 + 300 * session as u32,
            );
            let sector = 80_000 + 8 * session;
            self.request(at + 210, &session_file, 'w', (sector, 8), 250 + slow);
            if step % 2 == 0 {
                let image = self.below(3);
                let path = format!("/srv/images/{image}.jpg");
                let image = About::file("web-root", "/thumbs", 500 + image as u32, &path, 400_000);
                self.request(at + 260, &image, 'r', (500_000 + 1000 * step, 256), 700 + slow);
            }
            if step % 5 == 0 {
                self.request(at + 300, &journal, 'w', (2_048 + from_ms + 24 * step, 24), 300);
                self.request(at + 303, &flush, 'f', (0, 0), 1_200);
                self.request(at + 500, &inodes, 'w', (1_024, 8), 260);
            }
        }
    }
}

/// The sample as CSV.
pub fn csv() -> String {
    let mut sample = Sample::default();
    sample.usual(0, 2);
    // A disk whose activity stops.
    let swap = About::new("web-swap", "swap,1,,,,,/shop,,,vdb", SWAP);
    for step in 0..5 {
        let op = if step % 2 == 0 { 'w' } else { 'r' };
        sample.request(40_000 + 4_000 * step, &swap, op, (64 * step, 64), 500);
    }
    sample.usual(61_000, 1);
    // A backup reads a table from its beginning, faster than any other reader.
    let copy = "direct,6,905,/pg/base/16384,50331648,xfs,/backup,tar,977,vda1";
    let copy = About::new("db-data", copy, 0);
    for step in 0..14 {
        let sector = 4_000_000 + 512 * step;
        sample.request(66_020 + 30 * step, &copy, 'r', (sector, 512), 2_000 + 90 * step);
    }
    let thumbnail = About::file("web-root", "/thumbs", 520, "/srv/thumbs/new.png", 7_000);
    for at in [68_100, 68_400, 72_200] {
        sample.request(at, &thumbnail, 'w', (700_000, 16), 320);
    }
    // An unreadable sector, and requests without a response at the end of the sample.
    let broken = About::file("web-root", "/thumbs", 509, "/srv/images/9.jpg", 260_000);
    sample.request(70_000, &broken, 'r', (666_624, 256), 30_000);
    sample.request(72_970, &copy, 'r', (4_010_000, 512), 50_000);
    let log = About::file("web-root", "/shop", 310, "/srv/log/access.log", 20_000);
    sample.request(72_980, &log, 'w', (90_000, 8), 50_000);
    sample.lines.sort();
    let mut text = format!("{HEAD}\n");
    for (_, _, line) in &sample.lines {
        let _ = writeln!(text, "{line}");
    }
    text
}
