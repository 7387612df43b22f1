//! What a back end does of its own accord: rounds at times, wakers, background work, computations.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{
    Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue, Background,
    BackgroundScheduler, BackgroundStep, Capabilities, Clock, Crossing, Disk, DiskOptions,
    ErrorKind, Figure, Geometry, Layer, LayerPart, LayerQueue, OpenContext, Operation, Outcome,
    Permission, Request, StoreId, Urgency, Waker, Work,
};
use fathom_reactor::{Event, Reactor};
use parking_lot::Mutex;

mod support;

const STEP: BackgroundStep = BackgroundStep {
    bytes: 4096,
    waiting_bytes: 4096,
    waiting_steps: 1,
    deadline_ns: 1000,
    pause: 0,
};

/// What the queue has been told and has done.
#[derive(Default)]
struct Seen {
    rounds: AtomicU64,
    steps: AtomicU64,
    answers: AtomicU64,
    is_closed: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Seen {
    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }
}

/// A store that collects its garbage after each write: it computes for it, waits 50 ns, and does
/// one step of background work.
#[derive(Default)]
struct Collecting(Arc<Seen>);

impl Backend for Collecting {
    fn name(&self) -> &'static str {
        "collecting"
    }

    fn capacity(&self) -> u64 {
        1 << 20
    }

    fn geometry(&self) -> Geometry {
        Geometry::default()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::ALL
    }

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        *self.0.waker.lock() = Some(context.waker()?);
        Ok(Box::new(CollectingQueue {
            seen: Arc::clone(&self.0),
            background: context.background("collecting")?,
            work: context.work(Urgency::Background)?,
            due_ns: None,
            step_end_ns: None,
        }))
    }

    fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        Vec::new()
    }

    fn figures(&self) -> Vec<Figure> {
        vec![Figure::counter("steps_total", "The steps.", self.0.steps.load(Ordering::Relaxed))]
    }

    fn losses(&self) -> u64 {
        0
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        Ok(())
    }
}

struct CollectingQueue {
    seen: Arc<Seen>,
    background: Background,
    work: Work<u64>,
    /// When it asks for a step.
    due_ns: Option<u64>,
    /// When the step in flight ends.
    step_end_ns: Option<u64>,
}

impl BackendQueue for CollectingQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        if request.operation == Operation::Write {
            assert!(self.work.begin(0, || 7));
        }
        context.complete(request, Ok(()));
    }

    fn event(&mut self, _event: &Event, _context: &mut BackendContext<'_>) {}

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        self.seen.rounds.fetch_add(1, Ordering::Relaxed);
        let now_ns = context.now_ns();
        while let Some((_, answer)) = self.work.answer() {
            self.seen.answers.fetch_add(answer.unwrap(), Ordering::Relaxed);
            self.due_ns = Some(now_ns + 50);
        }
        if self.step_end_ns.is_some_and(|end_ns| end_ns <= now_ns) {
            self.step_end_ns = None;
            self.background.end(now_ns);
            self.seen.steps.fetch_add(1, Ordering::Relaxed);
        }
        if self.due_ns.is_some_and(|due_ns| due_ns <= now_ns) {
            match self.background.ask(STEP, now_ns) {
                Permission::Begin => {
                    (self.due_ns, self.step_end_ns) = (None, Some(now_ns + 20));
                }
                Permission::Wait(until_ns) => self.due_ns = Some(until_ns),
            }
        }
        for deadline_ns in self.due_ns.iter().chain(&self.step_end_ns) {
            context.wake_at(*deadline_ns);
        }
    }

    fn close(&mut self, _context: &mut BackendContext<'_>) {
        self.due_ns = None;
        self.background.rest();
        self.seen.is_closed.store(true, Ordering::Relaxed);
    }

    fn reopen(&mut self, _context: &mut BackendContext<'_>) {
        self.seen.is_closed.store(false, Ordering::Relaxed);
    }

    fn is_idle(&self) -> bool {
        self.step_end_ns.is_none()
    }
}

/// Lets steps begin from 500 ns on.
#[derive(Default)]
struct Late(Mutex<Vec<String>>);

impl BackgroundScheduler for Late {
    fn open(&self, disk: &str, layer: &'static str, _waker: Waker) -> u64 {
        self.0.lock().push(format!("open {disk} {layer}"));
        1
    }

    fn ask(&self, part: u64, step: BackgroundStep, now_ns: u64) -> Permission {
        assert_eq!((part, step), (1, STEP));
        if now_ns < 500 { Permission::Wait(500) } else { Permission::Begin }
    }

    fn end(&self, _part: u64, now_ns: u64) {
        self.0.lock().push(format!("end {now_ns}"));
    }

    fn rest(&self, _part: u64) {}

    fn close(&self, _part: u64) {
        self.0.lock().push("close".into());
    }
}

/// A layer with the store as a further one, to which it sends its writes.
struct Above(Arc<dyn Backend>);

impl Layer for Above {
    fn name(&self) -> &'static str {
        "above"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        struct Part(StoreId, Option<Box<Request>>);
        impl LayerQueue for Part {
            fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
                let mut own = next.request();
                own.operation = request.operation;
                own.length = request.length;
                own.buffers.allocate(request.length as usize);
                self.1 = Some(request);
                next.submit_to(self.0, own);
            }

            fn complete(
                &mut self,
                request: Box<Request>,
                outcome: Outcome,
                next: &mut Crossing<'_>,
            ) {
                next.complete(request, outcome);
            }

            fn returned(
                &mut self,
                request: Box<Request>,
                outcome: Outcome,
                next: &mut Crossing<'_>,
            ) {
                next.recycle(request);
                next.complete(self.1.take().unwrap(), outcome);
            }
        }
        Ok(LayerPart::queue(Part(context.open_store(&self.0)?, None)))
    }
}

/// Writes to a disk, and follows the deadlines of its stack until nothing is due.
fn collect(layers: Vec<Arc<dyn Layer>>, backend: Arc<dyn Backend>, seen: &Seen) {
    let options = DiskOptions { name: "disk".into(), ..DiskOptions::default() };
    let disk = Disk::new(options, layers, backend).unwrap();
    let scheduler = Arc::new(Late::default());
    disk.schedule_background(Arc::clone(&scheduler) as _);
    let mut reactor = Reactor::new(8).unwrap();
    let time_ns = Rc::new(Cell::new(100));
    let mut stack = disk.open_queue(&mut reactor, Clock::Simulated(Rc::clone(&time_ns))).unwrap();
    assert_eq!(stack.deadline_ns(), None, "an idle store asks for no round");
    for end_is_early in [false, true] {
        time_ns.set(100);
        let mut request = stack.request();
        request.operation = Operation::Write;
        request.length = 4096;
        request.buffers.allocate(4096);
        stack.submit(request, &mut reactor);
        stack.advance(&mut reactor);
        stack.advance(&mut reactor);
        let (request, outcome) = stack.completed().unwrap();
        assert_eq!(outcome, Ok(()));
        stack.recycle(request);
        // The computation has ended; the step is due, and then waits for the scheduler.
        let mut deadlines = Vec::new();
        while let Some(deadline_ns) = stack.deadline_ns() {
            deadlines.push(deadline_ns);
            assert!(deadline_ns > time_ns.get() && deadlines.len() < 9, "{deadlines:?}");
            time_ns.set(deadline_ns);
            stack.advance(&mut reactor);
            if end_is_early && deadline_ns == 500 {
                break;
            }
        }
        if end_is_early {
            assert_eq!(deadlines, [150, 500]);
        } else {
            assert_eq!(deadlines, [150, 500, 520]);
        }
    }
    // A step is in flight, which the end of the queue awaits.
    stack.close(&mut reactor);
    assert!(seen.is_closed.load(Ordering::Relaxed) && !stack.is_drained());
    time_ns.set(520);
    stack.advance(&mut reactor);
    assert!(stack.is_drained());
    stack.end(&mut reactor);
    drop(stack);
    assert_eq!(seen.answers.load(Ordering::Relaxed), 14);
    assert_eq!(*scheduler.0.lock(), ["open disk collecting", "end 520", "end 520", "close"]);
}

#[test]
fn a_store_works_at_its_times_and_ends_its_work_with_the_queue() {
    let store = Collecting::default();
    let seen = Arc::clone(&store.0);
    let store = Arc::new(store);
    collect(Vec::new(), Arc::clone(&store) as _, &seen);
    assert_eq!(store.figures()[0].value, 2);
}

#[test]
fn a_further_store_of_a_layer_does_the_same() {
    let store = Collecting::default();
    let seen = Arc::clone(&store.0);
    let above = Arc::new(Above(Arc::new(store)));
    let own = Arc::new(support::Recorder {
        record: support::Record::default(),
        capabilities: Capabilities::ALL,
        alignment: 1,
        later: false,
    });
    collect(vec![above], own, &seen);
}

#[test]
fn a_waker_of_a_store_wakes_a_sleeping_thread() {
    let store = Collecting::default();
    let seen = Arc::clone(&store.0);
    let disk = Disk::new(DiskOptions::default(), Vec::new(), Arc::new(store)).unwrap();
    let mut reactor = Reactor::new(8).unwrap();
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    let waker = seen.waker.lock().clone().unwrap();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        waker.wake();
    });
    let before = seen.rounds();
    // Sleeps until it is woken: the limit is far away.
    stack.wait(&mut reactor, Some(Duration::from_secs(60))).unwrap();
    thread.join().unwrap();
    stack.advance(&mut reactor);
    assert_eq!(seen.rounds(), before + 2);
}
