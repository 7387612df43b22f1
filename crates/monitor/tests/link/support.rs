//! Hosts with artificial events, a centre that collects results, and the connections between them.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_cql::catalog::{Column, StreamSchema};
use fathom_cql::{ParseOptions, Row, Value};
use fathom_monitor::ResultSink;
use fathom_monitor::io_stream;
use fathom_monitor::link::{
    Centre, CentreOptions, CentreStatus, EventItem, EventSource, Host, HostOptions, HostState,
    HostStatus, unix_time_ns,
};
use fathom_monitor::read::{Batch, ReadError, ReadReport, Reader, WantedStream};
use fathom_monitor::replay::Script;
use fathom_tls::{Certificates, Tls};
use parking_lot::Mutex;

pub const SECOND: i64 = 1_000_000_000;
/// The time limit of each wait.
pub const TIME_MAX: Duration = Duration::from_secs(120);

/// An event: its instant and its row.
pub type Event = (i64, Row);

/// Waits until a condition is true.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TIME_MAX;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not within {TIME_MAX:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Events of a host's disks, one each millisecond from an instant. Hosts with different numbers
/// have no events at the same instant.
pub fn events(host: usize, from_ns: i64, count: usize) -> Vec<Event> {
    let mut random = fastrand::Rng::with_seed(host as u64 + 1);
    let event = |at: usize| {
        let time_ns = from_ns + at as i64 * 1_000_000 + host as i64;
        let mut row = vec![Value::Null; io_stream().columns.len()];
        row[0] = Value::Integer(time_ns);
        row[1] = Value::text(if at % 2 == 0 { "Q" } else { "R" });
        row[2] = Value::text(["r", "w", "f"][random.usize(..3)]);
        row[3] = Value::Integer((at / 2) as i64);
        row[5] = Value::Integer(random.i64(1..64));
        row[7] = Value::text(&format!("disk-{host}-{}", random.usize(..3)));
        (time_ns, row)
    };
    (0..count).map(event).collect()
}

/// The next item of a source.
#[derive(Clone, Debug)]
pub enum Part {
    Events(Vec<Event>),
    Dropped(u64),
    /// An instant before which no more events follow.
    Watermark(i64),
}

/// The events that a test gives to a host.
#[derive(Clone, Default)]
pub struct Feed {
    parts: Arc<Mutex<VecDeque<Part>>>,
    wanted: Arc<AtomicBool>,
}

impl Feed {
    pub fn give(&self, part: Part) {
        self.parts.lock().push_back(part);
    }

    /// Adds events in small parts, each followed by its watermark.
    pub fn give_events(&self, events: &[Event], clock_skew_ns: i64) {
        for part in events.chunks(50) {
            let skewed = part.iter().cloned().map(|(time_ns, mut row)| {
                row[0] = Value::Integer(time_ns + clock_skew_ns);
                (time_ns + clock_skew_ns, row)
            });
            let skewed: Vec<Event> = skewed.collect();
            let last = skewed.last().unwrap().0;
            self.give(Part::Events(skewed));
            self.give(Part::Watermark(last + 1));
        }
    }

    /// Whether the host wants the events.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    pub fn is_empty(&self) -> bool {
        self.parts.lock().is_empty()
    }
}

/// The source of a host's events that reads a feed.
struct Source {
    feed: Feed,
    clock_skew_ns: i64,
    wanted: Vec<bool>,
}

impl EventSource for Source {
    fn streams(&self) -> Vec<StreamSchema> {
        vec![io_stream()]
    }

    fn clock_ns(&self) -> i64 {
        unix_time_ns() + self.clock_skew_ns
    }

    fn unix_offset_ns(&self) -> i64 {
        0
    }

    fn begin(&mut self, wanted: &[WantedStream]) -> Result<(), String> {
        self.wanted.clone_from(&wanted[0].columns);
        self.feed.wanted.store(true, Ordering::Release);
        Ok(())
    }

    fn next(&mut self, batch: &mut Batch) -> Result<Option<EventItem>, String> {
        batch.clear();
        Ok(self.feed.parts.lock().pop_front().map(|part| match part {
            Part::Events(events) => {
                for (time_ns, row) in events {
                    let mut wanted = self.wanted.iter();
                    let row = row.into_iter().filter(|_| *wanted.next().unwrap()).collect();
                    batch.push(time_ns, row);
                }
                EventItem::Rows
            }
            Part::Dropped(count) => EventItem::Dropped(count),
            Part::Watermark(time_ns) => EventItem::Watermark(time_ns),
        }))
    }

    fn end(&mut self) {
        self.feed.wanted.store(false, Ordering::Release);
    }
}

/// Starts a host whose clock differs from the centre's by `clock_skew_ns`.
pub fn host(feed: &Feed, options: HostOptions, clock_skew_ns: i64) -> Host {
    let source = Source { feed: feed.clone(), clock_skew_ns, wanted: Vec::new() };
    Host::start(options, Box::new(source)).unwrap()
}

/// Options of a host that connects in plain text and retries quickly.
pub fn plain(name: &str, centre: &str) -> HostOptions {
    let retry = (Duration::from_millis(10), Duration::from_millis(50));
    HostOptions { retry, ..HostOptions::new(name, centre) }
}

pub fn script(text: &str) -> Script {
    Script::prepare(text, &[], ParseOptions::default()).unwrap()
}

/// A centre at a free port of the loopback interface.
pub fn centre(text: &str, change: impl FnOnce(&mut CentreOptions)) -> Centre {
    let mut options = CentreOptions::new("127.0.0.1:0");
    options.ping = Duration::from_millis(50);
    change(&mut options);
    Centre::listen(options, script(text), &mut |_| true).unwrap()
}

/// The change of each row's count, by query, instant and row.
pub type Results = BTreeMap<(usize, i64, Row), i64>;

#[derive(Default)]
pub struct Collected(pub Results);

impl ResultSink for Collected {
    fn begin(&mut self, _: usize, _: &[Column], _: bool) -> io::Result<()> {
        Ok(())
    }

    fn delta(&mut self, query: usize, time_ns: i64, count: i64, row: &[Value]) -> io::Result<()> {
        *self.0.entry((query, time_ns, row.to_vec())).or_default() += count;
        Ok(())
    }
}

impl Collected {
    /// The results up to an instant.
    pub fn to(&self, time_ns: i64) -> Results {
        let mut results = self.0.clone();
        results.retain(|(_, time, _), count| *time <= time_ns && *count != 0);
        results
    }

    /// The number of a query's rows with this first column.
    pub fn rows(&self, query: usize, first: &Value) -> i64 {
        let of = self.0.iter().filter(|((of, _, row), _)| *of == query && row[0] == *first);
        of.map(|(_, count)| *count).sum()
    }
}

/// Runs a centre until its watermark reaches an instant.
pub fn run_to(centre: &mut Centre, collected: &mut Collected, time_ns: i64) {
    run_until(centre, collected, |watermark_ns| watermark_ns >= time_ns);
}

/// Runs a centre until a condition is true.
pub fn run_until(
    centre: &mut Centre,
    collected: &mut Collected,
    mut done: impl FnMut(i64) -> bool,
) {
    let end = Instant::now() + TIME_MAX;
    let watch = centre.watch();
    let mut keep_running = |watermark_ns| {
        assert!(Instant::now() < end, "at {watermark_ns}: {:#?}", watch.status());
        !done(watermark_ns)
    };
    centre.run(collected, &mut keep_running).unwrap();
}

/// Runs the centre until `count` hosts run its fragments: it waits for no host whose clock it has
/// not measured.
pub fn run_until_running(centre: &mut Centre, collected: &mut Collected, count: usize) {
    let watch = centre.watch();
    run_until(centre, collected, |_| {
        let hosts = watch.status().hosts;
        hosts.iter().filter(|host| host.state == HostState::Running).count() == count
    });
}

/// The results of one engine over all events.
pub fn expected(text: &str, mut all: Vec<Event>) -> Results {
    struct All(Vec<Event>, Vec<bool>, ReadReport);
    impl Reader for All {
        fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
            batch.clear();
            for (time_ns, row) in self.0.drain(..) {
                let mut wanted = self.1.iter();
                batch.push(time_ns, row.into_iter().filter(|_| *wanted.next().unwrap()).collect());
            }
            Ok(!batch.is_empty())
        }

        fn report(&self) -> &ReadReport {
            &self.2
        }
    }
    all.sort_by_key(|event| event.0);
    let script = script(text);
    let mut reader = All(all, script.wanted().to_vec(), ReadReport::default());
    let mut collected = Collected::default();
    script.run(&mut reader, 0, &mut collected).unwrap();
    collected.to(i64::MAX)
}

/// The status of a host at the centre.
#[track_caller]
pub fn of(status: &CentreStatus, name: &str) -> HostStatus {
    let host = status.hosts.iter().find(|host| host.name == name);
    host.unwrap_or_else(|| panic!("there is no {name}: {status:#?}")).clone()
}

/// A connection to the centre that can be cut and blocked.
pub struct Wire {
    pub address: String,
    connections: Arc<Mutex<Vec<(TcpStream, TcpStream)>>>,
    held: Arc<AtomicBool>,
    closed: Arc<AtomicBool>,
    passed: Arc<AtomicU64>,
}

impl Wire {
    pub fn to(target: String) -> Self {
        Self::with_delays(target, [Duration::ZERO; 2])
    }

    /// A connection on which bytes have these delays: to the target, and back.
    pub fn with_delays(target: String, delays: [Duration; 2]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let path = Self {
            address: listener.local_addr().unwrap().to_string(),
            connections: Arc::default(),
            held: Arc::default(),
            closed: Arc::default(),
            passed: Arc::default(),
        };
        let connections = Arc::clone(&path.connections);
        let (held, passed) = (Arc::clone(&path.held), Arc::clone(&path.passed));
        let closed = Arc::clone(&path.closed);
        std::thread::spawn(move || {
            for host in listener.incoming() {
                let host = host.unwrap();
                if closed.load(Ordering::Acquire) {
                    continue;
                }
                let Ok(centre) = TcpStream::connect(&target) else { continue };
                for ((from, to), delay) in
                    [(&host, &centre), (&centre, &host)].into_iter().zip(delays)
                {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (held, passed) = (Arc::clone(&held), Arc::clone(&passed));
                    let (sender, chunks) = std::sync::mpsc::sync_channel(16);
                    std::thread::spawn(move || {
                        let mut bytes = [0; 1 << 12];
                        while let Ok(count @ 1..) = from.read(&mut bytes) {
                            let due = Instant::now() + delay;
                            if sender.send((due, bytes[..count].to_vec())).is_err() {
                                break;
                            }
                        }
                    });
                    std::thread::spawn(move || {
                        for (due, bytes) in chunks {
                            std::thread::sleep(due.saturating_duration_since(Instant::now()));
                            while held.load(Ordering::Acquire) {
                                std::thread::sleep(Duration::from_millis(1));
                            }
                            if to.write_all(&bytes).is_err() {
                                break;
                            }
                            passed.fetch_add(bytes.len() as u64, Ordering::AcqRel);
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                connections.lock().push((host, centre));
            }
        });
        path
    }

    /// Cuts the current connections. New connections are possible.
    pub fn cut(&self) {
        for (host, centre) in self.connections.lock().drain(..) {
            let _ = host.shutdown(Shutdown::Both);
            let _ = centre.shutdown(Shutdown::Both);
        }
    }

    /// Cuts the current connections, and accepts no new ones.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.cut();
    }

    /// Blocks all bytes, or lets them pass again.
    pub fn hold(&self, held: bool) {
        self.held.store(held, Ordering::Release);
    }

    /// The number of bytes that have passed.
    pub fn passed(&self) -> u64 {
        self.passed.load(Ordering::Acquire)
    }
}

/// An authority and the certificates that it signs.
pub struct Authority {
    folder: tempfile::TempDir,
    key: openssl::pkey::PKey<openssl::pkey::Private>,
    certificate: openssl::x509::X509,
}

impl Authority {
    pub fn new() -> Self {
        let key = new_key();
        let certificate = certificate("authority", &key, None);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("authority.pem"), certificate.to_pem().unwrap()).unwrap();
        Self { folder, key, certificate }
    }

    /// The files of a party that has a certificate with a name, and trusts an authority.
    pub fn files(&self, name: &str, trusted: &Authority) -> Certificates {
        let path = |suffix: &str| self.folder.path().join(format!("{name}.{suffix}"));
        let key = new_key();
        let signed = certificate(name, &key, Some(self));
        std::fs::write(path("pem"), signed.to_pem().unwrap()).unwrap();
        std::fs::write(path("key"), key.private_key_to_pem_pkcs8().unwrap()).unwrap();
        Certificates { certificate: path("pem"), key: path("key"), authority: Some(trusted.path()) }
    }

    pub fn path(&self) -> PathBuf {
        Path::join(self.folder.path(), "authority.pem")
    }

    pub fn centre(&self) -> Tls {
        Tls::mutual_server(&self.files("centre", self)).unwrap()
    }

    /// Options of a host with a certificate of this authority.
    pub fn host(&self, name: &str, address: &str) -> HostOptions {
        let tls = Tls::mutual_client(&self.files(name, self)).unwrap();
        let centre_name = Some("centre".to_owned());
        HostOptions { tls: Some(tls), centre_name, ..plain(name, address) }
    }
}

fn new_key() -> openssl::pkey::PKey<openssl::pkey::Private> {
    use openssl::{ec, nid, pkey};
    let group = ec::EcGroup::from_curve_name(nid::Nid::X9_62_PRIME256V1).unwrap();
    pkey::PKey::from_ec_key(ec::EcKey::generate(&group).unwrap()).unwrap()
}

/// A certificate for a name, signed by an authority, or the certificate of an authority itself.
fn certificate(
    name: &str,
    key: &openssl::pkey::PKey<openssl::pkey::Private>,
    by: Option<&Authority>,
) -> openssl::x509::X509 {
    use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
    use openssl::{asn1, bn, hash, x509};
    let mut subject = x509::X509Name::builder().unwrap();
    subject.append_entry_by_text("CN", name).unwrap();
    let subject = subject.build();
    let mut builder = x509::X509::builder().unwrap();
    builder.set_version(2).unwrap();
    let number = bn::BigNum::from_u32(fastrand::u32(1..)).unwrap();
    builder.set_serial_number(&number.to_asn1_integer().unwrap()).unwrap();
    builder.set_subject_name(&subject).unwrap();
    builder.set_issuer_name(by.map_or(&subject, |by| by.certificate.subject_name())).unwrap();
    builder.set_pubkey(key).unwrap();
    builder.set_not_before(&asn1::Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&asn1::Asn1Time::days_from_now(2).unwrap()).unwrap();
    let extension = if let Some(by) = by {
        let context = builder.x509v3_context(Some(&by.certificate), None);
        SubjectAlternativeName::new().dns(name).build(&context).unwrap()
    } else {
        BasicConstraints::new().critical().ca().build().unwrap()
    };
    builder.append_extension(extension).unwrap();
    builder.sign(by.map_or(key, |by| &by.key), hash::MessageDigest::sha256()).unwrap();
    builder.build()
}
