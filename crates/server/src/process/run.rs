//! The life of the process: start, signals, shutdown.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_control::{ErrorBody, ErrorCode, SOCKET_DEFAULT, view_socket};
use fathom_insight::change::{Author, ChangeKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;

use crate::configuration::{Configuration, ConfigurationFile, DaemonOptions, Keepsakes};
use crate::daemon::Daemon;
use crate::daemon::change_log::Note;
use crate::daemon::http::listen::{Peer, ViewListener};
use crate::daemon::http::routes;
use crate::daemon::http::scrape;
use crate::daemon::stack::{refusal, socket_refusal};
use crate::features::keep;
use crate::process::group;
use crate::process::journal::Journal;
use crate::process::notify::notify;
use crate::process::text;

const SIGHUP: &str = "SIGHUP";
/// The longest pause between two attempts to listen at the address of `/metrics`.
const METRICS_PAUSE_MAX: Duration = Duration::from_secs(10);

/// How long the shutdown waits for slow listeners to receive their remaining events.
const DELIVERY_TIME_MAX: Duration = Duration::from_secs(2);

/// How long the end waits for who reads the log.
const LOG_TIME_MAX: Duration = Duration::from_secs(1);

/// The number of panics of the whole process, counted by the panic hook.
static FAILED_THREADS: AtomicU64 = AtomicU64::new(0);

/// Serves `configuration` until a signal or a request ends the daemon. With `is_strict`, a disk or
/// listener that cannot be served ends the start.
pub(crate) fn run(
    configuration: &Configuration,
    file: Option<ConfigurationFile>,
    is_strict: bool,
    begun: Instant,
) -> ExitCode {
    let journal = Journal::new(configuration.daemon.definition.log, false);
    journal.install();
    log_panics();
    raise_limits();
    configuration.log_warnings();
    let log = Arc::clone(&journal);
    let result = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(routes::threads_max())
        .thread_keep_alive(Duration::from_secs(1))
        .build()
        .map_err(|error| failed("the event loop cannot be started", &error))
        .map_err(|refused| vec![refused])
        .and_then(|runtime| {
            let result = runtime.block_on(serve(configuration, file, is_strict, journal, begun));
            runtime.shutdown_background();
            result
        });
    if result.is_err() {
        // No guest has written anything.
        keep::end();
    }
    #[expect(unsafe_code, reason = "ends the process without destructors")]
    match result {
        Ok(true) => {
            log.flush(LOG_TIME_MAX);
            ExitCode::SUCCESS
        }
        Ok(false) => {
            // Threads that wait for a disk may remain: their data must not be destroyed while they
            // run.
            log.flush(LOG_TIME_MAX);
            // SAFETY: the call has no preconditions and does not return.
            unsafe { libc::_exit(1) }
        }
        Err(refusals) => {
            report(&refusals);
            log.flush(LOG_TIME_MAX);
            ExitCode::FAILURE
        }
    }
}

/// Logs why the start has failed.
fn report(refusals: &[ErrorBody]) {
    for refused in refusals {
        tracing::error!("{}", refused.message);
        if !refused.remedy.is_empty() {
            tracing::error!("  → {}", refused.remedy);
        }
    }
}

fn failed(what: &str, error: &io::Error) -> ErrorBody {
    refusal(ErrorCode::Failed, format!("{what}: {error}"), "")
}

/// Serves until the end. Returns whether the shutdown was clean.
async fn serve(
    configuration: &Configuration,
    file: Option<ConfigurationFile>,
    is_strict: bool,
    journal: Arc<Journal>,
    begun: Instant,
) -> Result<bool, Vec<ErrorBody>> {
    let one = |refused: ErrorBody| vec![refused];
    let mut signals =
        Signals::new().map_err(|error| one(failed("signals cannot be received", &error)))?;
    // A write beyond the limit of the sizes of files is an error of that write (EFBIG). Without a
    // handler, the signal would end the process.
    let _file_size = signal(SignalKind::from_raw(libc::SIGXFSZ));
    let options = &configuration.daemon.definition;
    make_default_folder(&options.control).map_err(one)?;
    // First, because a second daemon with the same configuration is detected here.
    probe(&options.control).map_err(one)?;
    keep::begin(&options.control, options.keepsakes == Keepsakes::On);
    let sockets = bind_sockets(options).map_err(one)?;
    let daemon = Daemon::new(configuration, file, journal, begun);
    // Before the disks are opened, so that it is known which of them hang.
    let routers = Routers::new(&daemon);
    let servers = routers.serve(sockets);
    if let Err(refused) = begin_metrics(&daemon, configuration, is_strict) {
        daemon.stop();
        remove_sockets(&options.control);
        return Err(vec![refused]);
    }
    let mut start = {
        let (daemon, configuration) = (Arc::clone(&daemon), configuration.clone());
        // On a separate thread: signals must be received meanwhile.
        Box::pin(on_own_thread("start", move || daemon.begin(&configuration, is_strict)))
    };
    tokio::spawn(Arc::clone(&daemon).watch_problems());
    let reloads = Arc::new(Notify::new());
    tokio::spawn(reload_when_asked(Arc::clone(&daemon), routers, Arc::clone(&reloads)));
    let mut is_starting = true;
    loop {
        tokio::select! {
            started = &mut start, if is_starting => {
                is_starting = false;
                let started = started.unwrap_or_else(|| Err(one(failed_thread())));
                if let Err(refusals) = started {
                    return end_failed_start(&daemon, &options.control, refusals);
                }
                announce(&daemon, configuration.disks.len());
            }
            () = daemon.end_wanted.notified() => {
                tracing::info!("shutdown requested");
                break;
            }
            name = signals.next() => {
                if name == SIGHUP {
                    daemon.audit_own(name);
                    // Not waited for: a reload may take long, and other signals must be received
                    // meanwhile.
                    reloads.notify_one();
                    continue;
                }
                tracing::info!("shutting down: {name}");
                daemon.audit_own(name);
                break;
            }
        }
    }
    let clean = stop(&daemon, &mut signals).await;
    for server in servers {
        server.abort();
    }
    // Before another daemon may begin.
    if clean {
        keep::end();
    } else {
        keep::end_recorded();
    }
    remove_sockets(&options.control);
    tracing::info!("{}", if clean { "ended" } else { "ended, but not cleanly" });
    Ok(clean)
}

/// Ends a daemon whose start was refused. Returns the refusals, or, if the end was not clean
/// either, `false`.
fn end_failed_start(
    daemon: &Arc<Daemon>,
    control: &Path,
    refusals: Vec<ErrorBody>,
) -> Result<bool, Vec<ErrorBody>> {
    let problems = daemon.stop();
    remove_sockets(control);
    if problems.is_empty() {
        return Err(refusals);
    }
    // Guests of disks that were served may have written.
    report(&refusals);
    for problem in &problems {
        tracing::error!("{problem}");
    }
    keep::end_recorded();
    Ok(false)
}

/// Stops the daemon, unless another signal ends the process before. Returns whether the shutdown
/// was clean.
async fn stop(daemon: &Arc<Daemon>, signals: &mut Signals) -> bool {
    notify(&[NotifyState::Stopping]);
    let stopping = Arc::clone(daemon);
    let clean = tokio::select! {
        problems = on_own_thread("stop", move || stopping.stop()) => match problems {
            Some(problems) => {
                for problem in &problems {
                    tracing::error!("{problem}");
                }
                problems.is_empty()
            }
            None => false,
        },
        name = signals.end() => {
            tracing::error!("stopped immediately: a second {name}");
            false
        }
    };
    let delivered_by = Instant::now() + DELIVERY_TIME_MAX;
    while !daemon.events().all_delivered() && Instant::now() < delivered_by {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    clean
}

/// Begins to serve `/metrics` over TCP, if it is to be.
fn begin_metrics(
    daemon: &Arc<Daemon>,
    configuration: &Configuration,
    is_strict: bool,
) -> Result<(), ErrorBody> {
    let Some(address) = configuration.daemon.definition.metrics else { return Ok(()) };
    match bind_metrics(address) {
        Ok(listener) => serve_metrics(daemon, listener),
        Err(refused) if is_strict => return Err(refused),
        Err(refused) => {
            daemon.refuse_metrics(Some(refused));
            tokio::spawn(retry_metrics(Arc::clone(daemon), address));
        }
    }
    Ok(())
}

fn serve_metrics(daemon: &Arc<Daemon>, listener: tokio::net::TcpListener) {
    if let Ok(address) = listener.local_addr() {
        daemon.set_metrics(address);
    }
    tokio::spawn(scrape::serve_metrics(listener, Arc::clone(daemon)));
}

/// Tries to listen at the address of `/metrics` until it is free.
async fn retry_metrics(daemon: Arc<Daemon>, address: SocketAddr) {
    let mut pause = Duration::from_secs(1);
    loop {
        tokio::time::sleep(pause).await;
        pause = (pause * 3 / 2).min(METRICS_PAUSE_MAX);
        match bind_metrics(address) {
            Ok(listener) => {
                daemon.refuse_metrics(None);
                serve_metrics(&daemon, listener);
                return;
            }
            Err(refused) => daemon.refuse_metrics(Some(refused)),
        }
    }
}

/// Announces that the daemon is ready. `configured` is the number of disks of the configuration.
fn announce(daemon: &Daemon, configured: usize) {
    let took_us = daemon.ready();
    notify(&[NotifyState::Ready]);
    daemon.release_keepsakes();
    let unserved = daemon.info().disks_unserved;
    let disks = fathom_control::count(configured, "disk");
    let disks = if unserved == 0 {
        disks
    } else {
        format!("{} of {disks}", (configured as u64).saturating_sub(unserved))
    };
    let start = Note::new(ChangeKind::Start, Author::Daemon);
    daemon
        .note_change(&start.with_text(&format!("version {}, {disks}", env!("CARGO_PKG_VERSION"))));
    daemon.audit_own("start");
    tracing::info!(
        "ready in {}.{:03} ms: {disks}, control socket {}",
        took_us / 1000,
        took_us % 1000,
        daemon.control_socket().display()
    );
    text::give_back();
}

/// Runs `work` on a new thread, which does not wait for other work. `None` if the thread cannot be
/// started or panics.
async fn on_own_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
        let _ = sender.send(work());
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "the thread {name:?} cannot be started");
        return None;
    }
    receiver.await.ok()
}

fn failed_thread() -> ErrorBody {
    refusal(ErrorCode::Failed, "the daemon failed at its start", "see its log, and report a bug")
}

/// The control socket, and the socket for those who only look, if there is one.
type Sockets = (tokio::net::UnixListener, Option<tokio::net::UnixListener>);

/// Makes the sockets of the control interface.
fn bind_sockets(options: &DaemonOptions) -> Result<Sockets, ErrorBody> {
    let control = bind_control(&options.control, options.control_group.as_deref())?;
    let view = options.view_group.as_deref().map(|group| {
        bind_control(&view_socket(&options.control), Some(group)).inspect_err(|_| {
            let _ = std::fs::remove_file(&options.control);
        })
    });
    Ok((control, view.transpose()?))
}

fn remove_sockets(control: &Path) {
    for path in [control.to_owned(), view_socket(control)] {
        let _ = std::fs::remove_file(path);
    }
}

/// What is served at the sockets of the control interface.
#[derive(Clone)]
struct Routers {
    control: axum::Router,
    view: axum::Router,
}

impl Routers {
    fn new(daemon: &Arc<Daemon>) -> Self {
        let (control, view) = (Arc::clone(daemon), Arc::clone(daemon));
        Self { control: routes::router(control), view: routes::view_router(view) }
    }

    /// Accepts connections until the process ends, and pauses after errors.
    fn serve(&self, (control, view): Sockets) -> Vec<tokio::task::JoinHandle<()>> {
        let router = self.control.clone().into_make_service_with_connect_info::<Peer>();
        let mut servers = vec![tokio::spawn(async move {
            let _ = axum::serve(control, router).await;
        })];
        if let Some(view) = view {
            let router = self.view.clone();
            servers.push(tokio::spawn(async move {
                let _ = axum::serve(ViewListener::new(view), router).await;
            }));
        }
        servers
    }
}

/// Reads the configuration again at each notification. Notifications during a reload are merged.
/// Makes the sockets again if the control socket's path was deleted.
async fn reload_when_asked(daemon: Arc<Daemon>, routers: Routers, reloads: Arc<Notify>) {
    loop {
        reloads.notified().await;
        reload(&daemon).await;
        let control = daemon.control_socket();
        if control.symlink_metadata().is_ok() {
            continue;
        }
        let _ = std::fs::remove_file(view_socket(control));
        match bind_sockets(&daemon.options) {
            Ok(sockets) => {
                routers.serve(sockets);
                tracing::info!("reload: the control socket was made again");
            }
            Err(refused) => tracing::error!("reload: {}: {}", refused.message, refused.remedy),
        }
    }
}

async fn reload(daemon: &Arc<Daemon>) {
    // With the time, as services of the type `notify-reload` do.
    match NotifyState::monotonic_usec_now() {
        Ok(time) => notify(&[NotifyState::Reloading, time]),
        Err(_) => notify(&[NotifyState::Reloading]),
    }
    let daemon = Arc::clone(daemon);
    match tokio::task::spawn_blocking(move || daemon.reload(false)).await {
        Ok(Ok(report)) if report.changed.is_empty() && report.refused.is_empty() => {
            tracing::info!("reload: there are no differences");
        }
        Ok(Ok(_)) => {}
        Ok(Err(refused)) => {
            for line in refused.message.lines() {
                tracing::error!("reload: {line}");
            }
            tracing::error!("reload: {}", refused.remedy);
        }
        Err(_) => tracing::error!("reload: failed"),
    }
    notify(&[NotifyState::Ready]);
}

/// The signals that the daemon handles.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next signal that ends the daemon.
    async fn end(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }

    /// The next signal.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hangup.recv() => SIGHUP,
        }
    }
}

/// Makes the folder of the default control socket, which does not survive a restart of the host.
fn make_default_folder(control: &Path) -> Result<(), ErrorBody> {
    let Some(folder) = control.parent() else { return Ok(()) };
    if control != Path::new(SOCKET_DEFAULT) || folder.is_dir() {
        return Ok(());
    }
    std::fs::DirBuilder::new().mode(0o755).create(folder).map_err(|error| {
        refusal(
            ErrorCode::Failed,
            format!("{} cannot be made for the control socket: {error}", folder.display()),
            "choose a control socket with --control, for example in $XDG_RUNTIME_DIR",
        )
    })
}

/// Checks that the control socket is free.
fn probe(control: &Path) -> Result<(), ErrorBody> {
    if !fathom_frontend::socket::is_served(control) {
        return Ok(());
    }
    Err(refusal(
        ErrorCode::Conflict,
        format!("a daemon is running already: it listens at {}", control.display()),
        "stop it, or choose another control socket with --control",
    ))
}

fn bind_control(path: &Path, group: Option<&str>) -> Result<tokio::net::UnixListener, ErrorBody> {
    let refused = |error: &io::Error| socket_refusal(&path.display().to_string(), error);
    let listener = fathom_frontend::socket::listen(path).map_err(|error| refused(&error))?;
    if let Some(name) = group {
        group::admit(path, name).map_err(|error| {
            let _ = std::fs::remove_file(path);
            let message = format!("the group {name:?} cannot get {}: {error}", path.display());
            let remedy = "the daemon's user has to be a member of that group, or root";
            refusal(ErrorCode::Failed, message, remedy)
        })?;
    }
    listener.set_nonblocking(true).map_err(|error| refused(&error))?;
    tokio::net::UnixListener::from_std(listener).map_err(|error| refused(&error))
}

fn bind_metrics(address: SocketAddr) -> Result<tokio::net::TcpListener, ErrorBody> {
    let refused = |error: &io::Error| socket_refusal(&address.to_string(), error);
    let listener = std::net::TcpListener::bind(address).map_err(|error| refused(&error))?;
    listener.set_nonblocking(true).map_err(|error| refused(&error))?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(|error| refused(&error))?;
    if !address.ip().is_loopback() {
        tracing::warn!("metrics are served at {address} to any client, in plain text");
    }
    Ok(listener)
}

/// Logs panics like other events. A thread that panics ends; the others continue.
fn log_panics() {
    std::panic::set_hook(Box::new(|information| {
        FAILED_THREADS.fetch_add(1, Ordering::Relaxed);
        let thread = std::thread::current();
        let payload = information.payload();
        let message = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        let place = information.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(
            thread = thread.name().unwrap_or("unnamed"),
            place,
            "a thread failed because of a bug: {message}"
        );
    }));
}

/// The number of threads that have panicked.
pub(crate) fn failed_threads() -> u64 {
    FAILED_THREADS.load(Ordering::Relaxed)
}

/// Raises limits to those of the host: of descriptors, because each queue has a ring, and each
/// guest has its memory; of the sizes of files, because a write of a guest beyond it would fail.
fn raise_limits() {
    for resource in [Resource::Nofile, Resource::Fsize] {
        let maximum = getrlimit(resource).maximum;
        // On an error, the limit stays as it was.
        let _ = setrlimit(resource, Rlimit { current: maximum, maximum });
    }
}
