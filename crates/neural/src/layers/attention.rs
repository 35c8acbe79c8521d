//! Multi-head self-attention over the features of one sample, averaged over the features.
//!
//! Token of feature f: `e = embedding[f] + embedding_bias`. Output of a sample with tokens E:
//! `mean(E) + mean(MultiHead(E, E, E))`, with the projections of `torch.nn.MultiheadAttention` (Vaswani and others,
//! 2017). A sample without features gives the output bias. Samples never attend to each other.
//!
//! Two identities save most of the work: queries, keys and values depend on the feature alone, so they are computed
//! once per distinct feature; and the mean over the queries of `P V` is `mean(P) V`.

use crate::matrix::{Matrix, add, column_sums, multiply};
use crate::plan::AttentionShape;

/// What the backward pass needs of a forward pass.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Distinct features, ascending.
    distinct: Vec<u32>,
    /// Index into `distinct` of each token.
    place: Vec<u32>,
    /// Tokens of the distinct features, `distinct x width`.
    tokens: Vec<f32>,
    /// Queries, keys and values of the distinct features, `distinct x 3 width`.
    projected: Vec<f32>,
    /// Attention matrices, per sample and head, `n x n`.
    attention: Vec<f32>,
    /// Column means of the attention matrices, per sample and head, `n`.
    shares: Vec<f32>,
    /// Mean of `P V` per sample, `rows x width`.
    pooled: Vec<f32>,
    /// Queries, keys and values of one sample, `n x 3 width`.
    sample: Vec<f32>,
}

fn bounds(window: &[u32]) -> (usize, usize) {
    (window[0] as usize, window[1] as usize)
}

impl State {
    fn project(&mut self, shape: &AttentionShape, parameters: &[f32], used: &[u32]) {
        let d = shape.width;
        self.distinct.clear();
        self.distinct.extend_from_slice(used);
        self.distinct.sort_unstable();
        self.distinct.dedup();
        self.place.clear();
        let distinct = &self.distinct;
        self.place.extend(used.iter().map(|f| distinct.partition_point(|x| x < f) as u32));
        let u = self.distinct.len();
        let (embedding, bias) = (&parameters[shape.embedding.clone()], &parameters[shape.embedding_bias.clone()]);
        self.tokens.clear();
        for &feature in &self.distinct {
            let row = &embedding[feature as usize * d..][..d];
            self.tokens.extend(row.iter().zip(bias).map(|(e, b)| e + b));
        }
        self.projected.resize(u * 3 * d, 0.0);
        let weight = Matrix::new(&parameters[shape.in_weight.clone()], 3 * d, d);
        multiply(&mut self.projected, 3 * d, Matrix::new(&self.tokens, u, d), weight.transposed(), 1.0);
        let bias = &parameters[shape.in_bias.clone()];
        self.projected.chunks_exact_mut(3 * d).for_each(|row| add(row, bias));
    }

    /// Copies the queries, keys and values of the tokens `from..to` to `self.sample`.
    fn gather(&mut self, width: usize, from: usize, to: usize) {
        self.sample.clear();
        for &place in &self.place[from..to] {
            self.sample.extend_from_slice(&self.projected[place as usize * width..][..width]);
        }
    }
}

pub(crate) fn forward(
    shape: &AttentionShape,
    parameters: &[f32],
    offsets: &[u32],
    indices: &[u32],
    output: &mut [f32],
    state: &mut State,
) {
    let (d, heads) = (shape.width, shape.heads);
    let (h, rows) = (d / heads, offsets.len() - 1);
    let first = offsets[0] as usize;
    state.project(shape, parameters, &indices[first..offsets[rows] as usize]);
    state.attention.clear();
    state.shares.clear();
    state.pooled.clear();
    state.pooled.resize(rows * d, 0.0);
    let scale = 1.0 / (h as f32).sqrt();
    for (i, window) in offsets.windows(2).enumerate() {
        let (from, to) = bounds(window);
        let (from, to) = (from - first, to - first);
        let n = to - from;
        state.gather(3 * d, from, to);
        for head in 0..heads {
            let start = state.attention.len();
            state.attention.resize(start + n * n, 0.0);
            if n > 0 {
                let q = Matrix::strided(&state.sample[head * h..], n, h, 3 * d);
                let k = Matrix::strided(&state.sample[d + head * h..], n, h, 3 * d);
                multiply(&mut state.attention[start..], n, q, k.transposed(), scale);
                state.attention[start..].chunks_exact_mut(n).for_each(softmax);
            }
            let place = state.shares.len();
            state.shares.resize(place + n, 0.0);
            let shares = &mut state.shares[place..];
            state.attention[start..].chunks_exact(n.max(1)).for_each(|row| add(shares, row));
            shares.iter_mut().for_each(|s| *s /= n as f32);
            let pooled = &mut state.pooled[i * d + head * h..][..h];
            for (j, share) in shares.iter().enumerate() {
                let value = &state.sample[j * 3 * d + 2 * d + head * h..][..h];
                pooled.iter_mut().zip(value).for_each(|(p, v)| *p += share * v);
            }
        }
    }
    let weight = Matrix::new(&parameters[shape.out_weight.clone()], d, d);
    multiply(output, d, Matrix::new(&state.pooled, rows, d), weight.transposed(), 1.0);
    let bias = &parameters[shape.out_bias.clone()];
    for (row, window) in output.chunks_exact_mut(d).zip(offsets.windows(2)) {
        let (from, to) = bounds(window);
        add(row, bias);
        let share = 1.0 / (to - from).max(1) as f32;
        for &place in &state.place[from - first..to - first] {
            let token = &state.tokens[place as usize * d..][..d];
            row.iter_mut().zip(token).for_each(|(o, t)| *o += share * t);
        }
    }
}

fn softmax(row: &mut [f32]) {
    let top = row.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    row.iter_mut().for_each(|x| *x = (*x - top).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

/// Gradient of all parameters.
pub(crate) fn backward(
    shape: &AttentionShape,
    parameters: &[f32],
    offsets: &[u32],
    delta: &[f32],
    gradient: &mut [f32],
    state: &mut State,
) {
    let (d, rows, u) = (shape.width, offsets.len() - 1, state.distinct.len());
    let first = offsets[0] as usize;
    column_sums(&mut gradient[shape.out_bias.clone()], delta);
    let delta_matrix = Matrix::new(delta, rows, d);
    let pooled = Matrix::new(&state.pooled, rows, d);
    multiply(&mut gradient[shape.out_weight.clone()], d, delta_matrix.transposed(), pooled, 1.0);
    let mut pooled_delta = vec![0.0; rows * d];
    let out_weight = Matrix::new(&parameters[shape.out_weight.clone()], d, d);
    multiply(&mut pooled_delta, d, delta_matrix, out_weight, 1.0);

    let mut projected_delta = vec![0.0; u * 3 * d];
    let mut token_delta = vec![0.0; u * d];
    let (mut attention_at, mut share_at) = (0, 0);
    for (i, window) in offsets.windows(2).enumerate() {
        let (from, to) = bounds(window);
        let (from, to) = (from - first, to - first);
        let n = to - from;
        if n == 0 {
            continue;
        }
        state.gather(3 * d, from, to);
        let sample = sample_delta(shape, state, &pooled_delta[i * d..][..d], attention_at, share_at, n);
        attention_at += shape.heads * n * n;
        share_at += shape.heads * n;
        let share = 1.0 / n as f32;
        for (place, row) in state.place[from..to].iter().zip(sample.chunks_exact(3 * d)) {
            let place = *place as usize;
            add(&mut projected_delta[place * 3 * d..][..3 * d], row);
            let token = &mut token_delta[place * d..][..d];
            token.iter_mut().zip(&delta[i * d..]).for_each(|(t, x)| *t += share * x);
        }
    }
    let projected = Matrix::new(&projected_delta, u, 3 * d);
    multiply(&mut gradient[shape.in_weight.clone()], d, projected.transposed(), Matrix::new(&state.tokens, u, d), 1.0);
    column_sums(&mut gradient[shape.in_bias.clone()], &projected_delta);
    let mut through = vec![0.0; u * d];
    multiply(&mut through, d, projected, Matrix::new(&parameters[shape.in_weight.clone()], 3 * d, d), 1.0);
    add(&mut token_delta, &through);
    column_sums(&mut gradient[shape.embedding_bias.clone()], &token_delta);
    let embedding = &mut gradient[shape.embedding.clone()];
    embedding.fill(0.0);
    for (&feature, row) in state.distinct.iter().zip(token_delta.chunks_exact(d)) {
        embedding[feature as usize * d..][..d].copy_from_slice(row);
    }
}

/// Gradient of the queries, keys and values of one sample of `n` tokens from that of its pooled values.
fn sample_delta(
    shape: &AttentionShape,
    state: &State,
    pooled_delta: &[f32],
    attention_at: usize,
    share_at: usize,
    n: usize,
) -> Vec<f32> {
    let (d, heads) = (shape.width, shape.heads);
    let h = d / heads;
    let scale = 1.0 / (h as f32).sqrt();
    let mut out = vec![0.0; n * 3 * d];
    let mut scores = vec![0.0; n * n];
    let mut share_delta = vec![0.0; n];
    for head in 0..heads {
        let attention = &state.attention[attention_at + head * n * n..][..n * n];
        let shares = &state.shares[share_at + head * n..][..n];
        let pooled = &pooled_delta[head * h..][..h];
        for (j, share) in shares.iter().enumerate() {
            let value = &state.sample[j * 3 * d + 2 * d + head * h..][..h];
            share_delta[j] = value.iter().zip(pooled).map(|(v, p)| v * p).sum();
            let out = &mut out[j * 3 * d + 2 * d + head * h..][..h];
            out.iter_mut().zip(pooled).for_each(|(o, p)| *o = share * p);
        }
        for (row, out) in attention.chunks_exact(n).zip(scores.chunks_exact_mut(n)) {
            let mean: f32 = row.iter().zip(&share_delta).map(|(p, s)| p * s).sum();
            for ((o, p), s) in out.iter_mut().zip(row).zip(&share_delta) {
                *o = p * (s - mean) / n as f32;
            }
        }
        let q = Matrix::strided(&state.sample[head * h..], n, h, 3 * d);
        let k = Matrix::strided(&state.sample[d + head * h..], n, h, 3 * d);
        let scores = Matrix::new(&scores, n, n);
        multiply(&mut out[head * h..], 3 * d, scores, k, scale);
        multiply(&mut out[d + head * h..], 3 * d, scores.transposed(), q, scale);
    }
    out
}
