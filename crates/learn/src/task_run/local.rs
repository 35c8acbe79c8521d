//! Executes a run in this process: for tests, and for programs without a cluster.

use super::{MAX_INPUT_BYTES, MAX_RESULT_BYTES, StageResults, Task, TaskContext, TaskError, TaskFindings, TaskRun};
use crate::source::StopFlag;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a task may use in this process: one thread.
#[derive(Default)]
pub(super) struct LocalContext {
    stop: StopFlag,
}

impl TaskContext for LocalContext {
    fn progress(&self, _: f64) {}

    fn stop(&self) -> &StopFlag {
        &self.stop
    }

    fn threads(&self) -> usize {
        1
    }
}

/// Executes all stages with `workers` tasks at a time and returns what the run found.
///
/// # Errors
/// As the run; an input or a result above its limit is [`TaskError::Failed`].
pub fn run_locally(run: &dyn TaskRun, workers: usize) -> Result<TaskFindings, TaskError> {
    let mut results = Vec::new();
    loop {
        let tasks = run.plan(&results)?;
        if tasks.is_empty() {
            return run.finish(&results);
        }
        results.push(stage(run, &tasks, workers)?);
    }
}

/// Place of the result of one task.
type Slot = Mutex<Option<Result<Vec<u8>, TaskError>>>;

/// Executes the tasks of one stage, the most expensive first.
fn stage(run: &dyn TaskRun, tasks: &[Task], workers: usize) -> Result<StageResults, TaskError> {
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(tasks[index].cost));
    let next = AtomicUsize::new(0);
    let results: Vec<Slot> = tasks.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        let context = LocalContext::default();
        while let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
            let result = run.execute(&tasks[index], &context).and_then(|bytes| sized(&tasks[index], bytes));
            *results[index].lock().expect("a task does not panic") = Some(result);
        }
    };
    std::thread::scope(|scope| {
        (1..workers).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    let done = |result: Slot| result.into_inner().expect("a task does not panic");
    results.into_iter().map(|result| done(result).expect("every task was executed")).collect()
}

fn sized(task: &Task, result: Vec<u8>) -> Result<Vec<u8>, TaskError> {
    if result.len() <= MAX_RESULT_BYTES && task.input.len() <= MAX_INPUT_BYTES {
        return Ok(result);
    }
    let (name, input, output) = (&task.name, task.input.len(), result.len());
    Err(TaskError::Failed(format!(
        "task {name}: {input} bytes of input and {output} bytes of result; allowed: {MAX_INPUT_BYTES} and {MAX_RESULT_BYTES}"
    )))
}
