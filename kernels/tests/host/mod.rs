//! Kernels without a GPU: the `.cu` files compiled as C++ and run on the CPU in a separate process, under any sanitizer.
#![allow(clippy::unwrap_used)] // Test helpers.

pub(crate) mod build;

#[allow(unused_imports)] // Not every test injects bugs.
pub(crate) use build::{InjectedBug, Variant, program};

use engram_kernels::Error;
use engram_kernels::gpu::{Argument, Driver};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};

/// The process as a driver (`host/serve.cpp` defines its commands). A sanitizer report fails the test with its text.
pub(crate) struct Host(Arc<Mutex<Process>>);

/// Memory of the process.
pub(crate) struct Buffer {
    process: Arc<Mutex<Process>>,
    number: u64,
}

struct Process {
    child: Child,
    commands: Option<BufWriter<ChildStdin>>,
    answers: BufReader<ChildStdout>,
    stderr: File,
    buffers: u64,
}

impl Host {
    /// Starts `program`; threads of a block run in an order determined by the seed, or in index order without one.
    pub(crate) fn start(program: &Path, seed: Option<u64>) -> Self {
        let stderr = tempfile::tempfile().unwrap();
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr.try_clone().unwrap());
        // The first report ends the process; leaks are not checked.
        command.env("ASAN_OPTIONS", "detect_leaks=0").env("TSAN_OPTIONS", "halt_on_error=1:history_size=0");
        command.env("UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1").env_remove("CUDA_HOST_SEED");
        if let Some(seed) = seed {
            command.env("CUDA_HOST_SEED", seed.to_string());
        }
        let mut child = command.spawn().unwrap();
        let commands = child.stdin.take().map(BufWriter::new);
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self(Arc::new(Mutex::new(Process { child, commands, answers, stderr, buffers: 0 })))
    }

    fn send_command(&mut self, command: u8, numbers: &[u64], bytes: &[u8]) {
        let mut message = vec![command];
        message.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        message.extend(bytes);
        self.0.lock().unwrap().send(&message);
    }
}

impl Process {
    fn send(&mut self, message: &[u8]) {
        let sent = self.commands.as_mut().unwrap().write_all(message);
        self.expect(sent);
    }

    fn receive(&mut self, out: &mut [u8]) {
        let sent = self.commands.as_mut().unwrap().flush();
        self.expect(sent);
        let received = self.answers.read_exact(out);
        self.expect(received);
    }

    fn expect(&mut self, outcome: std::io::Result<()>) {
        if let Err(error) = outcome {
            let status = self.child.wait().unwrap();
            let mut stderr = String::new();
            self.stderr.rewind().unwrap();
            self.stderr.read_to_string(&mut stderr).unwrap();
            panic!("the kernel process exited ({status}, {error}):\n{stderr}");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The end of the command stream ends the process.
        self.commands = None;
        let _ = self.child.wait();
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Ok(mut process) = self.process.lock() else { return };
        let mut message = vec![b'F'];
        message.extend(self.number.to_le_bytes());
        // If the process has ended, the call that detects it reports why.
        let _ = process.commands.as_mut().map(|commands| commands.write_all(&message));
    }
}

impl Driver for Host {
    type Buffer = Buffer;
    type Graph = ();

    fn allocate(&mut self, bytes: usize) -> Result<Buffer, Error> {
        self.send_command(b'A', &[bytes as u64], &[]);
        let mut process = self.0.lock().unwrap();
        let number = process.buffers;
        process.buffers += 1;
        Ok(Buffer { process: Arc::clone(&self.0), number })
    }

    fn upload(&mut self, buffer: &Buffer, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.send_command(b'U', &[buffer.number, offset as u64, bytes.len() as u64], bytes);
        Ok(())
    }

    fn download(&mut self, buffer: &Buffer, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        self.send_command(b'D', &[buffer.number, offset as u64, out.len() as u64], &[]);
        self.0.lock().unwrap().receive(out);
        Ok(())
    }

    fn copy(&mut self, from: &Buffer, to: &Buffer, bytes: usize) -> Result<(), Error> {
        self.send_command(b'C', &[from.number, to.number, bytes as u64], &[]);
        Ok(())
    }

    fn fill(&mut self, buffer: &Buffer, range: Range<usize>, byte: u8) -> Result<(), Error> {
        self.send_command(b'S', &[buffer.number, range.start as u64, range.len() as u64, u64::from(byte)], &[]);
        Ok(())
    }

    fn launch(&mut self, kernel: &'static str, blocks: u32, arguments: &[Argument<'_, Buffer>]) -> Result<(), Error> {
        let mut operands = kernel.as_bytes().to_vec();
        operands.extend(u64::from(blocks).to_le_bytes());
        operands.extend((arguments.len() as u64).to_le_bytes());
        for argument in arguments {
            let (letter, numbers) = match *argument {
                Argument::Buffer(buffer) => (b'p', vec![buffer.number, 0]),
                Argument::Inside(buffer, offset) => (b'p', vec![buffer.number, offset as u64]),
                Argument::Null => (b'n', vec![0]),
                Argument::U32(number) => (b'4', vec![u64::from(number)]),
                Argument::U64(number) => (b'8', vec![number]),
                Argument::F32(number) => (b'f', vec![u64::from(number.to_bits())]),
            };
            operands.push(letter);
            operands.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        self.send_command(b'L', &[kernel.len() as u64], &operands);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), Error> {
        self.send_command(b'W', &[], &[]);
        self.0.lock().unwrap().receive(&mut [0]);
        Ok(())
    }
}
