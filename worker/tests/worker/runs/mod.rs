mod gpu;
mod tasks;
mod training;
