//! The life of the process: start, signals, end.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_control::{ErrorBody, ErrorCode, SOCKET_DEFAULT};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, Semaphore};

use crate::configuration::{Configuration, ConfigurationFile};
use crate::daemon::Daemon;
use crate::log::Journal;
use crate::notify::notify;
use crate::routes::{self, App};
use crate::wiring::{refusal, socket_refusal};

const SIGHUP: &str = "SIGHUP";
/// Threads for changes and for questions whose answers take long. They end when idle. Changes
/// occupy only some of them (`routes::CHANGES_MAX`), so that questions always find one.
const ASIDE_THREADS_MAX: usize = 64;

/// How long listeners that lag have at the end to take what there is for them.
const TELL_TIME_MAX: Duration = Duration::from_secs(2);

/// Of the whole process, as the hook that counts them is.
static FAILED_THREADS: AtomicU64 = AtomicU64::new(0);

/// Serves `configuration` until a signal or a request ends it.
pub(crate) fn run(
    configuration: &Configuration,
    file: Option<ConfigurationFile>,
    begun: Instant,
) -> ExitCode {
    let journal = Journal::new(configuration.daemon.log, false);
    journal.install();
    log_panics();
    raise_descriptor_limit();
    let result = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(ASIDE_THREADS_MAX)
        .thread_keep_alive(Duration::from_secs(1))
        .build()
        .map_err(|error| failed("no event loop", &error))
        .map_err(|refused| vec![refused])
        .and_then(|runtime| {
            let result = runtime.block_on(serve(configuration, file, journal, begun));
            runtime.shutdown_background();
            result
        });
    #[expect(unsafe_code, reason = "an end without ceremony")]
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            // Threads may be left that wait for a disk: nothing of theirs is taken down around
            // them. The log has been written.
            // SAFETY: the call has no preconditions and does not return.
            unsafe { libc::_exit(1) }
        }
        Err(refusals) => {
            for refused in refusals {
                tracing::error!("{}", refused.message);
                if !refused.remedy.is_empty() {
                    tracing::error!("  → {}", refused.remedy);
                }
            }
            ExitCode::FAILURE
        }
    }
}

fn failed(what: &str, error: &io::Error) -> ErrorBody {
    refusal(ErrorCode::Failed, format!("{what}: {error}"), "")
}

/// True when the end was clean.
async fn serve(
    configuration: &Configuration,
    file: Option<ConfigurationFile>,
    journal: Arc<Journal>,
    begun: Instant,
) -> Result<bool, Vec<ErrorBody>> {
    let one = |refused: ErrorBody| vec![refused];
    let mut signals = Signals::new().map_err(|error| one(failed("no signals", &error)))?;
    let options = &configuration.daemon;
    make_default_folder(&options.control).map_err(one)?;
    // First, because a second daemon with the same configuration is told so here.
    probe(&options.control).map_err(one)?;
    let start = {
        let configuration = configuration.clone();
        // On a thread of its own: an image on storage that hangs must not make the daemon deaf to
        // signals.
        on_own_thread("start", move || Daemon::start(&configuration, file, journal, begun))
    };
    let daemon = tokio::select! {
        started = start => started.ok_or_else(|| one(failed_thread()))??,
        name = signals.end() => {
            tracing::error!("ends before it was ready: {name}");
            return Ok(false);
        }
    };
    if let Some(monitor) = &configuration.monitor {
        if let Err(refused) = daemon.start_monitor(&monitor.definition) {
            daemon.stop();
            return Err(one(refused));
        }
    }
    let outside = bind_metrics(options.metrics).and_then(|metrics| {
        // Last, because whoever can connect may rely on all disks being served.
        Ok((metrics, bind_control(&options.control)?))
    });
    let (metrics, control) = match outside {
        Ok(bound) => bound,
        Err(refused) => {
            daemon.stop();
            return Err(vec![refused]);
        }
    };
    if let Some(listener) = metrics {
        if let Ok(address) = listener.local_addr() {
            daemon.set_metrics(address);
        }
        tokio::spawn(routes::serve_metrics(listener, Arc::clone(&daemon)));
    }
    let end = Arc::new(Notify::new());
    let app = App {
        daemon: Arc::clone(&daemon),
        end: Arc::clone(&end),
        changes: Arc::new(Semaphore::new(routes::CHANGES_MAX)),
    };
    let server = tokio::spawn(async move {
        // Accepts until the process ends; its own errors it sleeps over.
        let _ = axum::serve(control, routes::router(app)).await;
    });
    // Commands may ask the control interface from here on.
    if let Err(refused) = daemon.keep_queries(&configuration.queries) {
        daemon.stop();
        return Err(vec![refused]);
    }
    let took_us = daemon.ready();
    notify(&[NotifyState::Ready]);
    tracing::info!(
        "ready in {}.{:03} ms: {}, control socket {}",
        took_us / 1000,
        took_us % 1000,
        fathom_control::count(configuration.disks.len(), "disk"),
        options.control.display()
    );
    tokio::spawn(Arc::clone(&daemon).watch_problems());
    let reloads = Arc::new(Notify::new());
    tokio::spawn(reload_when_asked(Arc::clone(&daemon), Arc::clone(&reloads)));
    loop {
        tokio::select! {
            () = end.notified() => {
                tracing::info!("asked to end");
                break;
            }
            name = signals.next() => {
                if name == SIGHUP {
                    // Not waited for: it may take long, and other signals must be heard.
                    reloads.notify_one();
                    continue;
                }
                tracing::info!("ends: {name}");
                break;
            }
        }
    }
    notify(&[NotifyState::Stopping]);
    let stopping = Arc::clone(&daemon);
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
            tracing::error!("ends at once: a second {name}");
            false
        }
    };
    let delivered_by = Instant::now() + TELL_TIME_MAX;
    while !daemon.events().all_delivered() && Instant::now() < delivered_by {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    server.abort();
    let _ = std::fs::remove_file(&options.control);
    tracing::info!("{}", if clean { "ended" } else { "ended, but not cleanly" });
    Ok(clean)
}

/// Does `work` on a new thread, which depends on no other work's end. `None` where there is no
/// thread for it, or where it failed.
async fn on_own_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
        let _ = sender.send(work());
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "there is no thread to {name} with");
        return None;
    }
    receiver.await.ok()
}

fn failed_thread() -> ErrorBody {
    refusal(ErrorCode::Failed, "the daemon failed at its start", "see its log, and report a bug")
}

/// Reads the configuration again at each notification. Notifications during a reload are one.
async fn reload_when_asked(daemon: Arc<Daemon>, reloads: Arc<Notify>) {
    loop {
        reloads.notified().await;
        reload(&daemon).await;
    }
}

async fn reload(daemon: &Arc<Daemon>) {
    // With the time, as services of the type `notify-reload` do.
    match NotifyState::monotonic_usec_now() {
        Ok(time) => notify(&[NotifyState::Reloading, time]),
        Err(_) => notify(&[NotifyState::Reloading]),
    }
    let daemon = Arc::clone(daemon);
    match tokio::task::spawn_blocking(move || daemon.reload()).await {
        Ok(Ok(report)) if report.changed.is_empty() && report.refused.is_empty() => {
            tracing::info!("reload: nothing is different");
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

/// The signals that mean something here.
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

    /// The next that asks for the end.
    async fn end(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }

    /// The next of all.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hangup.recv() => SIGHUP,
        }
    }
}

/// The folder of the default control socket does not survive a restart of the host.
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

/// Whether the control socket is free.
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

fn bind_control(path: &Path) -> Result<tokio::net::UnixListener, ErrorBody> {
    let refused = |error: &io::Error| socket_refusal(&path.display().to_string(), error);
    let listener = fathom_frontend::socket::listen(path).map_err(|error| refused(&error))?;
    listener.set_nonblocking(true).map_err(|error| refused(&error))?;
    tokio::net::UnixListener::from_std(listener).map_err(|error| refused(&error))
}

fn bind_metrics(address: Option<SocketAddr>) -> Result<Option<tokio::net::TcpListener>, ErrorBody> {
    let Some(address) = address else { return Ok(None) };
    let refused = |error: &io::Error| socket_refusal(&address.to_string(), error);
    if !address.ip().is_loopback() {
        tracing::warn!("metrics are had at {address} by whoever reaches it, in plain text");
    }
    let listener = std::net::TcpListener::bind(address).map_err(|error| refused(&error))?;
    listener.set_nonblocking(true).map_err(|error| refused(&error))?;
    tokio::net::TcpListener::from_std(listener).map(Some).map_err(|error| refused(&error))
}

/// Has panics logged like everything else. The thread that panics ends; the others go on.
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
            "a thread failed, which is a bug: {message}"
        );
    }));
}

/// Threads that have panicked so far.
pub(crate) fn failed_threads() -> u64 {
    FAILED_THREADS.load(Ordering::Relaxed)
}

/// Allows as many descriptors as the host does: each queue has a ring and each guest its memory.
fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Where it fails, the limit is as it was.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
