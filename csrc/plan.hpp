// Writing the plan of a call as JSON, and the counts that plans of all devices share.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "validate.hpp"

namespace flash_cute {

// Of FLOPs and bytes: the largest problems have more of them than 64 bits hold.
using Count = unsigned __int128;

inline std::string decimal(Count count) {
  std::string digits;
  for (; count > 0 || digits.empty(); count /= 10) digits.insert(0, 1, char('0' + int(count % 10)));
  return digits;
}

class JsonObject {
 public:
  JsonObject& add(char const* key, std::string const& text) { return add_raw(key, '"' + text + '"'); }
  JsonObject& add(char const* key, char const* text) { return add(key, std::string(text)); }
  template <class Number>
  JsonObject& add(char const* key, Number number) {
    std::ostringstream text;
    text.precision(9);
    text << number;
    return add_raw(key, text.str());
  }
  JsonObject& add(char const* key, Count count) { return add_raw(key, decimal(count)); }
  JsonObject& add(char const* key, std::optional<int64_t> number) {
    return number ? add(key, *number) : add_raw(key, "null");
  }
  JsonObject& add(char const* key, std::vector<std::string> const& texts) {
    std::string list;
    for (std::string const& text : texts) list += (list.empty() ? "\"" : ", \"") + text + '"';
    return add_raw(key, '[' + list + ']');
  }
  JsonObject& add_raw(char const* key, std::string const& json) {
    body_ += (body_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + json;
    return *this;
  }
  std::string text() const { return '{' + body_ + '}'; }

 private:
  std::string body_;
};

// What any device has to do for this problem: FLOPs for every visible pair and element of head_dim; rows of
// q's size and of k's that are read and written once, and the LSE.
inline JsonObject& add_work(JsonObject& plan, AttentionProblem const& problem, int flops, int rows_q,
                            int rows_k) {
  ProblemShape const& shape = problem.shape;
  Count const sequences = Count(shape.batch) * shape.heads_q;
  Count const rows =
      rows_q * sequences * shape.seqlen_q + rows_k * Count(shape.batch) * shape.heads_kv * shape.seqlen_k;
  return plan.add("head_dim", shape.head_dim)
      .add("flops", flops * sequences * shape.head_dim * problem.mask().visible_pairs())
      .add("bytes", rows * shape.head_dim * element_bytes(problem.element) +
                        sequences * shape.seqlen_q * sizeof(float))
      .add("softmax_scale", problem.softmax_scale)
      .add("window_left", problem.window_left)
      .add("window_right", problem.window_right);
}

// Two products; q and out, k and v.
inline JsonObject& add_problem(JsonObject& plan, AttentionProblem const& problem) {
  return add_work(plan, problem, 4, 2, 2);
}

// Five products; q, out, dout and dq, k, v, dk and dv.
inline JsonObject& add_backward_problem(JsonObject& plan, AttentionProblem const& problem) {
  return add_work(plan, problem, 10, 4, 4);
}

}  // namespace flash_cute
