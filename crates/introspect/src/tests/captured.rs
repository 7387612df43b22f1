//! Captured guests: images made by scripts/capture, and the guests' own reports.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fathom_guest_memory::GuestMemory;
use fathom_insight::{ClassTable, Insight, Kind, Names};

use super::mutations::Sum;
use crate::image::open_image;
use crate::kernel::Kernel;
use crate::resolver::RequestView;
use crate::synthetic::{
    Effort, MutationSubject, NamedFacts, Store, SyntheticRequest, attach, check,
};

/// A line of the truth, which is the guest's own report.
#[derive(Debug, Default, Clone)]
struct Line {
    kind: String,
    words: HashMap<String, String>,
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let (kind, mut rest) = line.split_once(' ')?;
        let mut words = HashMap::new();
        while let Some((key, value)) = rest.split_once('=') {
            // A path or a command extends to the end of the line.
            let end = if key == "path" || key == "comm" { None } else { value.find(' ') };
            words.insert(key.to_owned(), value[..end.unwrap_or(value.len())].to_owned());
            rest = end.map_or("", |end| &value[end + 1..]);
        }
        Some(Self { kind: kind.to_owned(), words })
    }

    fn text(&self, key: &str) -> &str {
        self.words.get(key).map_or("", String::as_str)
    }

    fn number(&self, key: &str) -> u64 {
        let text = self.text(key);
        text.strip_prefix("0x")
            .map_or_else(|| text.parse().ok(), |hex| u64::from_str_radix(hex, 16).ok())
            .unwrap_or(0)
    }
}

/// A request in flight.
#[derive(Clone, Debug)]
struct InFlight {
    device: String,
    view: RequestView,
    pieces: Vec<(u64, u64)>,
}

struct Captured {
    name: String,
    memory: GuestMemory,
    truth: Vec<Line>,
}

impl Captured {
    fn open(image: &Path) -> Self {
        let truth = std::fs::read_to_string(image.with_extension("truth")).unwrap();
        Self {
            name: image.file_stem().unwrap().to_string_lossy().into_owned(),
            memory: open_image(image, 2 << 30).unwrap(),
            truth: truth.lines().filter_map(Line::parse).collect(),
        }
    }

    fn all() -> Vec<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest/images");
        let files = std::fs::read_dir(&folder).expect("images: scripts/capture");
        let mut images: Vec<PathBuf> = files
            .filter_map(|file| Some(file.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "raw"))
            .collect();
        images.sort();
        assert!(!images.is_empty(), "no images: scripts/capture");
        images.iter().map(|image| Self::open(image)).collect()
    }

    fn lines(&self, kind: &str) -> impl Iterator<Item = &Line> {
        self.truth.iter().filter(move |line| line.kind == kind)
    }

    /// A number of the guest's report.
    fn number(&self, kind: &str, key: &str) -> u64 {
        self.lines(kind).find(|line| line.words.contains_key(key)).unwrap().number(key)
    }

    fn requests(&self) -> Vec<InFlight> {
        self.lines("ring").flat_map(|ring| ring_requests(&self.memory, ring)).collect()
    }
}

/// The requests that a ring's driver made available last, whether or not they have completed.
fn ring_requests(memory: &GuestMemory, ring: &Line) -> Vec<InFlight> {
    let (size, table) = (ring.number("num"), ring.number("desc"));
    let chain = |mut table: u64, mut index: u64| -> Option<Vec<(u64, u64, bool)>> {
        let mut pieces = Vec::new();
        for _ in 0..1024 {
            let at = table + index * 16;
            let (address, length) = (memory.u64(at)?, u64::from(memory.u32(at + 8)?));
            let (flags, next) = (memory.u16(at + 12)?, u64::from(memory.u16(at + 14)?));
            if flags & 4 != 0 {
                (table, index) = (address, 0);
                continue;
            }
            pieces.push((address, length, flags & 2 != 0));
            if flags & 1 == 0 {
                return Some(pieces);
            }
            index = next;
        }
        None
    };
    let request = |slot: u64| {
        let head = u64::from(memory.u16(ring.number("avail") + 4 + 2 * slot)?);
        let pieces = chain(table, head)?;
        let (header, length, _) = *pieces.first()?;
        let kind = memory.u32(header)?;
        if length != 16 || kind > 1 {
            return None;
        }
        let data = &pieces[1..pieces.len() - 1];
        let pieces: Vec<_> = data.iter().map(|(address, length, _)| (*address, *length)).collect();
        Some(InFlight {
            device: ring.text("device").to_owned(),
            view: RequestView {
                header,
                sector: memory.u64(header + 8)?,
                length: pieces.iter().map(|(_, length)| length).sum(),
                carries_data: true,
                is_write: kind == 1,
                now_ns: 0,
            },
            pieces,
        })
    };
    let mut found: Vec<InFlight> = (0..size).filter_map(request).collect();
    found.sort_by_key(|request| request.view.header);
    found.dedup_by_key(|request| request.view.header);
    found
}

impl Captured {
    /// The requests in flight: those of a ring whose header is still part of a request to the
    /// ring's device, and whose meaning is known.
    fn known(&self, kernel: &Kernel, names: &Arc<Names>) -> Vec<(InFlight, Vec<NamedFacts>)> {
        let layout = &kernel.layout;
        let disk = |request: &InFlight| {
            let request = request.view.header.checked_sub(layout.request_size)?;
            let queue = self.memory.u64(request + layout.request_queue)?;
            let disk = kernel.pointer(queue.wrapping_add(layout.queue_disk))?;
            kernel.text(disk.wrapping_add(layout.disk_name), 32)
        };
        let mut requests = self.requests();
        requests.retain(|request| {
            kernel.owns_request(request.view.header)
                && disk(request).as_ref() == Some(&request.device)
        });
        let guest = attach(&self.memory, names, requests[0].view.header);
        let mut resolver = guest.resolver();
        let resolve = |request: InFlight| {
            let mut insight = Insight::default();
            let pieces = request.pieces.iter().copied();
            resolver.resolve(&request.view, pieces, &ClassTable::default(), &mut insight);
            check(&insight, request.view.length, names);
            let reported = NamedFacts::all(request.view.length, &insight, names);
            (request, reported)
        };
        let reported = requests.into_iter().map(resolve);
        // A completed request has no bio.
        reported
            .filter(|(_, reported)| reported.iter().any(|reported| reported.kind != Kind::Unknown))
            .collect()
    }
}

/// The last reported facts about files, by file system and inode.
fn files(captured: &Captured) -> HashMap<(String, u64), Vec<&Line>> {
    let mut files: HashMap<_, Vec<&Line>> = HashMap::new();
    for line in captured.lines("file").filter(|line| line.number("inode") != 0) {
        files.entry((line.text("fs").to_owned(), line.number("inode"))).or_default().push(line);
    }
    files
}

#[test]
#[ignore = "needs images: scripts/capture"]
fn files_that_are_cached() {
    for captured in Captured::all() {
        let names = Names::default();
        let kernel = Kernel::attach(&captured.memory, None).unwrap();
        assert_eq!(kernel.release(), captured.name);
        let cached: Vec<NamedFacts> = kernel
            .cached_files(&names)
            .iter()
            .map(|file| NamedFacts::new(file.pages, &file.facts, &names))
            .collect();
        let truth = files(&captured);
        let mut found = Vec::new();
        for reported in &cached {
            let key = (reported.file_system.clone(), reported.inode);
            let Some(lines) = truth.get(&key) else { continue };
            let of_device =
                |line: &&&Line| ["-", reported.device.as_str()].contains(&line.text("device"));
            let Some(line) = lines.iter().rfind(of_device) else { continue };
            assert_eq!(reported.path, line.text("path"), "{}: {reported:?}", captured.name);
            assert_eq!(
                u64::from(reported.owner),
                line.number("uid"),
                "{}: {reported:?}",
                captured.name
            );
            // The file may have grown since the report.
            let grown = reported.file_size - line.number("size");
            assert!(
                grown == 0 || grown == 5 && reported.path == "/web/small1",
                "{reported:?} {line:?}"
            );
            assert!(reported.length <= reported.file_size.div_ceil(4096), "{reported:?}");
            found.push((reported.file_system.as_str(), reported.path.as_str()));
        }
        // The sum of the pages is the kernel's counter.
        let pages: u64 = cached.iter().map(|reported| reported.length).sum();
        let counted = captured.number("vmstat", "nr_file_pages");
        assert!(pages.abs_diff(counted) < counted / 50, "{}: {pages} {counted}", captured.name);
        // Most of the reported files are cached; the guest may have dropped some to free memory.
        let small =
            cached.iter().filter(|reported| reported.path.starts_with("/web/small")).count();
        assert!(found.len() > 10 && small > 40, "{}: {small}, {found:?}", captured.name);
        for fs in ["ext4", "xfs", "btrfs"] {
            assert!(found.iter().any(|(of, _)| *of == fs), "{}: {fs}", captured.name);
        }
        let gone = cached.iter().filter(|reported| reported.path == "/gone (deleted)");
        assert!(gone.clone().all(|reported| reported.file_size == 20_000));
        println!(
            "{}: {} files, {} of those that the guest reported, {} of those that it removed",
            captured.name,
            cached.len(),
            found.len(),
            gone.count()
        );
    }
}

#[test]
#[ignore = "needs images: scripts/capture"]
fn processes_and_counters() {
    for captured in Captured::all() {
        let kernel = Kernel::attach(&captured.memory, None).unwrap();
        let tasks = kernel.tasks();
        // The guest reported its tasks twice. The last report is valid for tasks that have not
        // ended since.
        let mut truth: HashMap<u64, &str> = HashMap::new();
        for line in captured.lines("task") {
            truth.insert(line.number("pid"), line.text("comm"));
        }
        let mut found = 0;
        for task in &tasks {
            let Some(comm) = truth.get(&u64::from(task.process_id)) else { continue };
            // The report also has the current work of a kernel thread, and does not truncate names.
            assert!(comm.starts_with(&task.command), "{}: {task:?} {comm}", captured.name);
            found += 1;
        }
        assert!(found + 8 >= truth.len(), "{}: {found} of {}", captured.name, truth.len());
        assert!(found + 32 >= tasks.len(), "{}: {found} of {}", captured.name, tasks.len());
        for (command, count) in [("init", 1), ("kthreadd", 1), ("fio", 9), ("dd", 1)] {
            let there = tasks.iter().filter(|task| task.command == command).count();
            assert!(there >= count, "{}: {there} times {command}", captured.name);
        }

        let number = |kind, key| captured.number(kind, key);
        let counters = kernel.counters();
        let close = |value: Option<u64>, truth: u64| {
            // Requests continued during the report.
            let value = value.unwrap();
            assert!(value.abs_diff(truth) < 8 << 20, "{}: {value} {truth}", captured.name);
        };
        assert_eq!(counters.total, Some(number("meminfo", "MemTotal") << 10));
        close(counters.dirty, number("vmstat", "nr_dirty") << 12);
        close(counters.writeback, number("vmstat", "nr_writeback") << 12);
        close(counters.file_pages, number("vmstat", "nr_file_pages") << 12);
        close(counters.free, number("vmstat", "nr_free_pages") << 12);
    }
}

#[test]
#[ignore = "needs images: scripts/capture"]
fn requests_in_flight() {
    for captured in Captured::all() {
        let kernel = Kernel::attach(&captured.memory, None).unwrap();
        let names = Arc::new(Names::default());
        let known = captured.known(&kernel, &names);
        for line in captured.lines("inflight") {
            let truth = line.number("reads") + line.number("writes");
            let of_device = |(request, _): &&(InFlight, _)| request.device == line.text("device");
            let count = known.iter().filter(of_device).count() as u64;
            // Two requests per second completed during the report.
            assert!(count.abs_diff(truth) <= 3, "{}: {count} {line:?}", captured.name);
        }
        let fio: Vec<u32> = kernel
            .tasks()
            .into_iter()
            .filter(|task| task.command == "fio")
            .map(|task| task.process_id)
            .collect();
        let truth = files(&captured);
        let mut waiting = 0;
        for (request, parts) in &known {
            for reported in parts {
                let is = |kind, path: &str, cgroup: &str| {
                    (reported.kind, reported.path.as_str(), reported.cgroup.as_str())
                        == (kind, path, cgroup)
                };
                // Blocks are charged to the nearest group with a counter. Btrfs writes data with
                // checksums through the page cache.
                let right = match reported.kind {
                    Kind::Direct => is(Kind::Direct, "/batch/direct", "/batch"),
                    Kind::Device => request.device == "vdb" && reported.cgroup == "/batch",
                    Kind::Data => {
                        is(Kind::Data, "/batch/cold", "/batch")
                            || is(Kind::Data, "/web/upload", "/web")
                            || is(Kind::Data, "/web/small1", "/web")
                            || reported.file_system == "btrfs"
                                && is(Kind::Data, "/batch/direct", "/batch")
                    }
                    Kind::Metadata | Kind::Journal => reported.inode == 0,
                    _ => false,
                };
                assert!(right, "{}: {request:?} {reported:?}", captured.name);
                if reported.inode != 0 {
                    let lines = &truth[&(reported.file_system.clone(), reported.inode)];
                    assert!(
                        lines.iter().any(|line| line.text("path") == reported.path),
                        "{reported:?}"
                    );
                    assert_eq!(reported.device, request.device);
                }
                if reported.process_id != 0 {
                    assert_eq!(reported.process, "fio", "{}: {reported:?}", captured.name);
                    assert!(fio.contains(&reported.process_id), "{}: {reported:?}", captured.name);
                    waiting += 1;
                }
            }
        }
        assert!(waiting > 0, "{}: fio's psync waits for its own", captured.name);
    }
}

/// A guest whose memory can be manipulated, in a copy of the memory.
fn subject(captured: &Captured) -> MutationSubject {
    let kernel = Kernel::attach(&captured.memory, None).unwrap();
    let known = captured.known(&kernel, &Arc::new(Names::default()));
    let requests = known.into_iter().map(|(request, truth)| SyntheticRequest {
        name: "captured",
        view: request.view,
        pieces: request.pieces,
        truth,
    });
    let requests: Vec<SyntheticRequest> = requests.collect();
    let regions: Vec<_> =
        captured.memory.regions().iter().map(|region| (region.start, region.length)).collect();
    let store = Store::new(&regions).unwrap();
    for region in captured.memory.regions() {
        for (start, end) in region.touched(0).collect::<Vec<_>>() {
            let mut bytes = vec![0; (end - start) as usize];
            captured.memory.read(start, &mut bytes).unwrap();
            store.write(start, &bytes);
        }
    }
    // The direct map, from a pointer into it.
    let request = requests[0].view.header - kernel.layout.request_size;
    let queue = captured.memory.u64(request + kernel.layout.request_queue).unwrap();
    let direct = queue - kernel.space.direct(queue).unwrap();
    MutationSubject::over(store, requests, direct)
}

#[test]
#[ignore = "needs images: scripts/capture"]
fn images_that_are_manipulated() {
    for captured in Captured::all() {
        let mut subject = subject(&captured);
        for (request, reported) in subject.clean() {
            assert_eq!(reported, request.truth);
        }
        for (effort, runs) in [(Effort::Request, 200_000), (Effort::Everything, 700)] {
            println!("{}, {effort:?}:", captured.name);
            let sum = Sum::of("an image", &mut subject, effort, 0..runs);
            assert!(sum.attached * 4 > runs * 3);
            assert!(sum.outcome.same > sum.outcome.unsure);
        }
    }
}
