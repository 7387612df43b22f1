//! The back end: a volume, and the thread that talks to its cluster.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fathom_block::{
    Backend, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, ErrorKind, Figure,
    Geometry, PartAnswer,
};
use fathom_failure::Failure;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::client::{Client, ClusterOptions};
use crate::layout::{GROUP, is_name};
use crate::queue::ClusterQueue;
use crate::volume::{CAPACITY_MAX, GroupOperation, Volume, VolumeOptions};

/// The time limit of an opening.
const OPEN_TIME_MAX: Duration = Duration::from_secs(50);

/// A part of a request, for the volume's thread.
pub(crate) struct Job {
    pub(crate) work: GroupOperation,
    pub(crate) answer: PartAnswer,
}

/// The way to the volume's thread, which ends when the last one is dropped.
#[derive(Clone)]
pub(crate) struct Jobs(UnboundedSender<Job>);

impl Jobs {
    /// Sends a part. Returns it if the thread has ended.
    pub(crate) fn send(&self, job: Job) -> Result<(), Job> {
        self.0.send(job).map_err(|error| error.0)
    }
}

/// A disk whose blocks are in a Valkey cluster. A completed write is durable on a node, and on as
/// many replicas as the options want. `docs/valkey.md` describes what is promised.
pub struct ClusterVolume {
    volume: Arc<Volume>,
    jobs: Jobs,
}

impl ClusterVolume {
    /// Opens a volume, or makes it. All earlier openings of it fail from then on. Blocks.
    ///
    /// # Errors
    /// If the cluster does not answer, does not keep what it acknowledges, or has lost a part of
    /// the volume.
    pub fn open(options: &ClusterOptions, volume: &VolumeOptions) -> Result<Self, Failure> {
        if !is_name(&volume.name) {
            let failure = Failure::new(format!("{:?} is not the name of a volume", volume.name));
            return Err(failure.advise("use letters, digits, and `.`, `_` and `-`"));
        }
        if volume.capacity > CAPACITY_MAX {
            let failure = Failure::new("a volume has at most 256 GiB");
            return Err(failure.advise("choose a smaller `size`"));
        }
        let (jobs, received) = mpsc::unbounded_channel();
        let (opened, result) = std::sync::mpsc::channel();
        let (options, wanted) = (options.clone(), volume.clone());
        let thread = std::thread::Builder::new().name("valkey".into());
        let spawned = thread.spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = opened.send(Err(error.into()));
                    return;
                }
            };
            runtime.block_on(async move {
                let open = Volume::open(&options, &wanted);
                let open = tokio::time::timeout(OPEN_TIME_MAX, open).await.unwrap_or_else(|_| {
                    let failure = Failure::new("the cluster does not answer in time");
                    Err(failure.advise("repair it"))
                });
                match open.map(Arc::new) {
                    Ok(volume) => {
                        if opened.send(Ok(Arc::clone(&volume))).is_ok() {
                            serve(&volume, received).await;
                        }
                    }
                    Err(error) => {
                        let _ = opened.send(Err(error));
                    }
                }
            });
            // Requests to nodes that hang do not keep the thread.
            runtime.shutdown_background();
        });
        spawned?;
        let volume = result.recv().map_err(|_| Failure::new("the volume's thread ended"))??;
        Ok(Self { volume, jobs: Jobs(jobs) })
    }
}

/// Removes a volume with all of its content, and what is left of one. Who uses it gets errors.
/// Blocks.
///
/// # Errors
/// If the cluster does not answer, or the name is none.
pub fn forget(options: &ClusterOptions, name: &str) -> Result<u64, Failure> {
    if !is_name(name) {
        let failure = Failure::new(format!("{name:?} is not the name of a volume"));
        return Err(failure.advise("correct it"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let removed = runtime.block_on(async {
        let client = Client::connect(options).await?;
        let blocks = client.remove(&format!("fathom:{{{name}#*")).await?;
        Ok::<_, Failure>(blocks + client.remove(&crate::layout::volume_key(name)).await?)
    });
    runtime.shutdown_background();
    removed
}

/// Carries out parts until nobody can send more.
async fn serve(volume: &Arc<Volume>, mut received: UnboundedReceiver<Job>) {
    while let Some(Job { work, answer }) = received.recv().await {
        let volume = Arc::clone(volume);
        tokio::spawn(async move {
            let found = volume.carry_out(work).await;
            answer.finish(found);
        });
    }
}

impl Backend for ClusterVolume {
    fn name(&self) -> &'static str {
        "valkey"
    }

    fn capacity(&self) -> u64 {
        self.volume.capacity.load(Ordering::Relaxed)
    }

    fn geometry(&self) -> Geometry {
        Geometry { optimal_size: GROUP as u32, ..Geometry::default() }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { extents: false, ..Capabilities::ALL }
    }

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        let queue =
            ClusterQueue::open(Arc::clone(&self.volume), self.jobs.clone(), context.reactor())?;
        Ok(Box::new(queue))
    }

    fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        let trouble = self.volume.troubles();
        let lost = trouble.lost.map(|text| BackendProblem::TakenOver { text });
        let unreachable = trouble.unreachable.map(|(_, text)| BackendProblem::Unreachable { text });
        let wrong = trouble.wrong.map(|text| BackendProblem::ContentWrong { text });
        [lost, unreachable, wrong].into_iter().flatten().collect()
    }

    fn figures(&self) -> Vec<Figure> {
        let meaning = "The parts of requests that were repeated because a node failed.";
        let repeats = self.volume.repeats.load(Ordering::Relaxed);
        vec![Figure::counter("repeats_total", meaning, repeats)]
    }

    fn losses(&self) -> u64 {
        0
    }

    fn frees_zeroes(&self) -> bool {
        // A script does not replace a newer value.
        true
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        Ok(())
    }
}
